from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from epd_portable.transfer.cores import cores_kept, timers_late


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


def test_timers_are_late_in_threads_that_start_meanwhile_and_nowhere_else() -> None:
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
