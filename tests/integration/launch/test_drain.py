"""The end of a topology that serves: the router answers what is open, then the engines end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.launch.conftest import ROUTES, Asked

Launch = Callable[..., Any]
TOPOLOGY = {
    "pd-0": [],
    "router": [ROUTES, "--engine=pd-0=prefill-decode=http://127.0.0.1:{port[pd-0]}"],
}


def said_by_router(run: Any) -> list[str]:
    return [line for line in (run.log_dir / "router.log").read_text().splitlines() if line]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_open_request_is_answered_after_the_stop_signal(
    launch: Launch, signum: signal.Signals
) -> None:
    run = launch(TOPOLOGY)
    run.wait_for("ready:")
    pid = run.pid_of("pd-0")
    asked = Asked(run, 1.0)
    # As a terminal does it: everybody of the launcher's process group, and nobody else.
    os.killpg(run.process.pid, signum)
    run.wait_for("open requests may take 30 s to end (router.drain_s)")
    assert json.loads(asked.ended()) == {"engine": "pd-0", "pid": pid}
    assert run.process.wait(30) == 0
    assert run.nothing_left()
    assert said_by_router(run) == ["got SIGTERM", "drains", "has answered everybody"]


def test_what_takes_longer_than_the_grace_is_cut(launch: Launch) -> None:
    run = launch(
        {**TOPOLOGY, "router": [*TOPOLOGY["router"], "--never-ends"]}, drain_s=0.5, stop_grace_s=0.5
    )
    run.wait_for("ready:")
    began = time.monotonic()
    asked = Asked(run, 60.0)
    assert run.stop(signal.SIGTERM) == 0
    assert asked.ended().startswith(("URLError", "Remote", "Connection", "<HTTPError"))
    # The grace, the margin and the grace of the rest.
    assert 0.5 < time.monotonic() - began < 15
    assert run.nothing_left()


def test_a_second_signal_ends_the_grace(launch: Launch) -> None:
    run = launch({**TOPOLOGY, "router": [*TOPOLOGY["router"], "--never-ends"]}, drain_s=600.0)
    run.wait_for("ready:")
    asked = Asked(run, 60.0)
    run.process.send_signal(signal.SIGTERM)
    run.wait_for("open requests may take 600 s to end")
    assert run.stop(signal.SIGTERM) == 0
    assert "pid" not in asked.ended()
    assert run.nothing_left()


def test_a_router_that_is_dead_is_not_waited_for(launch: Launch) -> None:
    run = launch(TOPOLOGY, backoff={"first_s": 60.0, "max_s": 60.0})
    run.wait_for("ready:")
    os.kill(run.pid_of("router"), signal.SIGKILL)
    run.wait_for("restarting it in 60 s")
    assert run.stop(signal.SIGTERM) == 0
    assert run.nothing_left()


def test_nothing_is_left_when_the_launcher_is_killed_while_it_drains(launch: Launch) -> None:
    run = launch({**TOPOLOGY, "router": [*TOPOLOGY["router"], "--never-ends"]}, drain_s=600.0)
    run.wait_for("ready:")
    run.process.send_signal(signal.SIGTERM)
    run.wait_for("open requests may take 600 s to end")
    (guard,) = run.guard_pids()
    os.kill(guard, signal.SIGKILL)
    run.until(lambda: set(run.guard_pids()) - {guard}, "there is another guard")
    run.stop(signal.SIGKILL)
    run.until(run.nothing_left, "the guard has cleaned up")
