"""The supervisor with real processes: stand-in servers instead of engines."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epd_portable import envs
from epd_portable.launch.run import sessions

Launch = Callable[..., Any]
FAST_RESTART = (0.2, 0.8)


@pytest.mark.parametrize(
    ("signum", "options", "said"),
    [
        (signal.SIGINT, ["--hang"], "encode-0 (Starting to load model nothing)"),
        (signal.SIGTERM, ["--stubborn", "--child"], "ready:"),
    ],
    ids=["starting", "deaf"],
)
def test_a_stop_signal_ends_everything_with_status_0(
    launch: Launch, signum: signal.Signals, options: list[str], said: str
) -> None:
    servers = {"encode-0": ["--shm={shm}", *options], "front": []}
    launch(servers, stop_grace_s=0.5, until=said).stop(signum)


def test_failed_start_ends_all_with_one_line(launch: Launch) -> None:
    servers = {"encode-0": ["--shm={shm}"], "other-0": ["--fail=no such device 7"]}
    run = launch(servers, until="failed:")
    assert run.lines[-1] == (
        "failed: other-0 exited with status 1: ValueError: no such device 7 "
        f"(log: {run.log_dir / 'other-0.log'})"
    )
    run.ends_well(1)


def test_process_killed_while_serving_restarts_on_its_port(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PROMETHEUS_MULTIPROC_DIR", envs.EPD_METRICS_DIR.name):
        monkeypatch.setenv(name, "/of/another")
    problem = "encode-0 answered a first request 501"
    run = launch(
        {"encode-0": ["--child", "--shm={shm}"], "front": [f"--problem={problem}"]},
        pauses_s=FAST_RESTART,
        stop_grace_s=0.5,
    )
    # What went wrong when the front warmed up is said.
    assert any("serving all the same" in line and problem in line for line in run.lines)
    front = run.pid_of("front")
    first = run.pid_of("encode-0")
    for pid in (front, first):  # Engines that share a folder show each other's metrics.
        assert b"/of/another" not in Path(f"/proc/{pid}/environ").read_bytes()
    os.kill(first, signal.SIGKILL)
    assert run.wait_for("restarting") == (
        f"encode-0 was killed by SIGKILL (log: {run.log_dir / 'encode-0.log'}); "
        "restarting it in 0.2 s"
    )
    run.wait_for("encode-0 has recovered")
    second = run.pid_of("encode-0")
    assert second != first
    os.kill(second, signal.SIGKILL)
    run.wait_for("restarting it in 0.4 s")
    run.wait_for("encode-0 has recovered")
    assert run.pid_of("front") == front
    # One child of the living instance; those of the dead ones were ended with them.
    assert len(sessions.members([], run.run_id)) == 3
    run.stop()


def test_shared_memory_of_an_early_killed_process_is_removed(launch: Launch) -> None:
    servers = {"encode-0": ["--shm={shm}"], "front": []}
    run = launch(servers, note_every_s=600.0, pauses_s=(600.0, 600.0))
    [file] = sessions.SHM.glob(f"epd-{run.run_id}-*")
    os.kill(run.pid_of("encode-0"), signal.SIGKILL)
    run.wait_for("restarting")
    assert not file.exists()
    run.stop()


def test_failed_restart_is_repeated_while_others_serve(launch: Launch) -> None:
    """The log can be neither opened nor read: its folder is gone."""
    run = launch({"encode-0": [], "front": []}, pauses_s=FAST_RESTART)
    away = run.log_dir.rename(f"{run.log_dir}-away")
    os.kill(run.pid_of("encode-0"), signal.SIGKILL)
    run.wait_for("encode-0 was killed by SIGKILL")
    (guard,) = run.guard_pids()
    os.kill(guard, signal.SIGKILL)
    run.wait_for("until there is a guard")
    assert "encode-0.log cannot be written" in run.wait_for("encode-0 was not started")
    away.rename(run.log_dir)
    run.wait_for("encode-0 has recovered")
    run.stop()


def test_killed_launcher_session_leaves_no_process(launch: Launch) -> None:
    servers = {"encode-0": ["--shm={shm}", "--child", "--renamed"], "front": ["--stubborn"]}
    run = launch(servers, stop_grace_s=0.5)
    assert not run.nothing_left()
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait(30)
    run.until(run.nothing_left, "the guard has cleaned up")
