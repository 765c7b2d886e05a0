from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from epd_portable.transfer.cores import cores_kept, on_all_cores, timers_late


def test_a_thread_runs_afterwards_where_it_ran_before() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="on purpose"), cores_kept():
        os.sched_setaffinity(0, {max(before)})
        raise ValueError("on purpose")
    after = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)
    assert after == before
    if len(before) == 1:
        pytest.skip("there is one core")


def test_new_threads_get_the_cores_of_every_thread() -> None:
    """OpenMP binds the thread that loads it to one core."""
    before = os.sched_getaffinity(0)
    if len(before) == 1:
        pytest.skip("there is one core")
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    os.sched_setaffinity(0, {max(before)})
    try:
        with on_all_cores():
            inside = os.sched_getaffinity(0)
        after = os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, before)
        end.set()
        other.join()
    assert (inside, after) == (before, {max(before)})


def test_timer_slack_is_set_only_for_threads_started_within() -> None:
    def slack_ns() -> int:
        return int(Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text())

    found: list[int] = []
    before = slack_ns()
    with pytest.raises(ValueError, match="on purpose"), timers_late():
        thread = threading.Thread(target=lambda: found.append(slack_ns()))
        thread.start()
        thread.join()
        raise ValueError("on purpose")
    assert found == [100_000_000]
    assert slack_ns() == before != found[0]
