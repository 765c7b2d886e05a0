"""Processes that live and are silent while the topology serves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

Launch = Callable[..., Any]
WATCHED = {
    "hung_after_s": 1.5,
    "stop_grace_s": 0.5,
    "pauses_s": (0.2, 0.8),
}


def ill(run: Any, name: str = "encode-0") -> None:
    """Wait until a process is ended because it is silent."""
    line = run.wait_for(f"{name} has not answered as it should for")
    assert line.endswith(" s (launch.hung_after_s); ending it")


def test_a_stopped_engine_is_killed_after_the_grace_and_started_again(launch: Launch) -> None:
    run = launch({"encode-0": [], "encode-1": [], "router": []}, **WATCHED)
    first, other, router = (run.pid_of(name) for name in ("encode-0", "encode-1", "router"))
    os.kill(first, signal.SIGSTOP)
    ill(run)
    run.wait_for("encode-0 does not end within 0.5 s; killing it")
    assert "encode-0 was killed by SIGKILL" in run.wait_for("restarting it in 0.2 s")
    run.wait_for("encode-0 is back")
    assert run.pid_of("encode-0") != first
    assert (run.pid_of("encode-1"), run.pid_of("router")) == (other, router)
    run.stop()


def test_an_engine_that_calls_itself_ill_for_good_is_started_again_ever_later(
    launch: Launch,
) -> None:
    run = launch({"encode-0": [], "router": []}, **WATCHED | {"stop_grace_s": 30.0})
    for status, delay in ((500, "0.2"), (503, "0.4")):
        run.ask("encode-0", f"/become/{status}")
        ill(run)
        # It hears SIGTERM, so it is not killed.
        assert "encode-0 exited with status 0" in run.wait_for(f"restarting it in {delay} s")
        run.wait_for("encode-0 is back")


def test_a_router_that_has_nobody_to_use_is_left_alone(launch: Launch) -> None:
    run = launch({"encode-0": [], "router": []}, **WATCHED)
    first = run.pid_of("router")
    run.ask("router", "/become/503")
    time.sleep(2 * WATCHED["hung_after_s"])  # type: ignore[operator]
    assert run.pid_of("router") == first
    os.kill(first, signal.SIGSTOP)
    ill(run, "router")
    run.wait_for("router is back")
