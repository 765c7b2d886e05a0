"""Fixtures that the tests of the simulated runtime share."""

from __future__ import annotations

import pytest

from ci.ascend_sim.tests.runtime import acl


@pytest.fixture(autouse=True)
def device() -> int:
    """Use device 0 in the test's thread; its number."""
    acl.call("aclrtSetDevice", 0)
    return 0


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> float:
    """Let every copy last; seconds."""
    seconds = 0.6
    monkeypatch.setenv("ASCEND_SIM_COPY_US", str(int(seconds * 1e6)))
    return seconds
