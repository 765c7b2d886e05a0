from __future__ import annotations

import os

import pytest

from epd_portable.runners.cores import cores_kept


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
