"""The end of a topology that serves: the front answers what is open, then the engines end."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import termios
from collections.abc import Callable

from tests.integration.launch.conftest import Asked, Run

Routed = Callable[..., Run]
ENGINE = {"pd-0": []}


def answered(run: Run, asked: Asked) -> None:
    """Check that an open request is answered, and then the launcher ends."""
    run.ask("pd-0", "/release")
    assert "pid" in asked.ended()
    run.ends_well()


def test_request_beyond_the_drain_is_aborted(routed: Routed) -> None:
    run = routed(ENGINE, drain_s=0.5, drain_margin_s=0.5, stop_grace_s=0.5)
    asked = Asked(run)
    run.stop()
    assert "error" in asked.ended()


def test_a_second_signal_ends_the_grace(routed: Routed) -> None:
    run = routed(ENGINE, drain_s=600.0)
    asked = Asked(run)
    run.process.send_signal(signal.SIGTERM)
    run.wait_for("open requests may take 600 s to end")
    run.stop()
    assert "error" in asked.ended()


def test_launcher_killed_in_drain_leaves_no_process(routed: Routed) -> None:
    run = routed({"pd-0": ["--shm={shm}", "--renamed"]}, drain_s=600.0)
    Asked(run)
    run.process.send_signal(signal.SIGTERM)
    run.wait_for("open requests may take 600 s to end")
    (guard,) = run.guard_pids()
    os.kill(guard, signal.SIGKILL)
    run.until(lambda: set(run.guard_pids()) - {guard}, "there is another guard")
    run.process.kill()
    run.until(run.nothing_left, "the guard has cleaned up")


def test_an_open_request_is_answered_after_the_stop_signal(routed: Routed) -> None:
    run = routed(ENGINE)
    asked = Asked(run)
    # As a terminal does it: every process of the launcher's group, and no other.
    os.killpg(run.process.pid, signal.SIGINT)
    run.wait_for("open requests may take 30 s to end (front.drain_s)")
    answered(run, asked)


def test_open_request_is_answered_while_another_engine_restarts(routed: Routed) -> None:
    run = routed({"pd-0": [], "pd-1": []}, pauses_s=(600.0, 600.0))
    os.kill(run.pid_of("pd-1"), signal.SIGKILL)
    run.wait_for("restarting")
    asked = Asked(run)
    run.process.send_signal(signal.SIGTERM)
    run.wait_for("open requests may take 30 s to end")
    answered(run, asked)


def with_terminal(routed: Routed, on_hangup: signal.Handlers) -> tuple[Run, int]:
    """Return a topology of a launcher with a terminal of its own, and the terminal's other end."""
    terminal, theirs = pty.openpty()

    def take_it() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, on_hangup)

    popen = {"preexec_fn": take_it, "pass_fds": (theirs,)}
    run = routed(ENGINE, popen=popen, pauses_s=(0.2, 0.8))
    os.close(theirs)
    return run, terminal


def test_closed_terminal_stops_the_launcher(routed: Routed) -> None:
    run, terminal = with_terminal(routed, signal.SIG_DFL)
    asked = Asked(run)
    os.close(terminal)
    run.wait_for("open requests may take 30 s to end")
    run.process.send_signal(signal.SIGHUP)  # By its shell, after the kernel.
    answered(run, asked)


def test_launcher_under_nohup_outlives_its_terminal(routed: Routed) -> None:
    run, terminal = with_terminal(routed, signal.SIG_IGN)
    os.close(terminal)
    run.process.send_signal(signal.SIGHUP)
    engine = run.pid_of("pd-0")
    os.kill(engine, signal.SIGKILL)
    run.wait_for("pd-0 has recovered")
    assert not any("stopping" in line for line in run.lines)
    run.stop()
