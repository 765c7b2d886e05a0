"""Processes that live and are silent while the topology serves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

Launch = Callable[..., Any]


def ill(run: Any, name: str) -> None:
    """Wait until a process is ended because it is silent."""
    line = run.wait_for(f"{name} has not responded as it should for")
    assert line.endswith(" s (launch.hung_after_s); terminating it")


def test_stopped_process_is_killed_and_restarted(launch: Launch) -> None:
    front_options = ["--instances=encode-0,encode-1"]
    servers = {"encode-0": [], "encode-1": [], "front": front_options}
    run = launch(servers, hung_after_s=1.5, stop_grace_s=0.5, pauses_s=(0.2, 0.8))
    first, other, front = (run.pid_of(name) for name in ("encode-0", "encode-1", "front"))
    # It has nobody to use from now on, which is no fault of it.
    run.ask("front", "/become/503")
    os.kill(first, signal.SIGSTOP)
    ill(run, "encode-0")
    run.wait_for("encode-0 does not end within 0.5 s; killing it")
    assert "encode-0 was killed by SIGKILL" in run.wait_for("restarting it in 0.2 s")
    run.wait_for("encode-0 has recovered")
    assert run.pid_of("encode-0") != first
    assert (run.pid_of("encode-1"), run.pid_of("front")) == (other, front)
    os.kill(front, signal.SIGSTOP)
    ill(run, "front")
    run.wait_for("front has recovered")
    run.stop()
