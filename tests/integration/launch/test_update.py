"""SIGHUP: engines are restarted one after the other; `tests/faults/test_updates.py` has load."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import signal
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import certifi

from tests.integration.launch.conftest import Asked, Run, client_of

Routed = Callable[..., Run]
TWO: dict[str, list[str]] = {"pd-0": [], "pd-1": []}


def drained(run: Run) -> list[str]:
    """Return the instances that the front was asked to drain."""
    text = (run.log_dir / "front.log").read_text()
    return re.findall(r"instance (\S+) drains$", text, re.MULTILINE)


def test_what_is_not_idle_within_the_grace_is_cut(routed: Routed) -> None:
    run = routed(TWO, drain_s=0.3)
    Asked(run, 60.0)
    run.process.send_signal(signal.SIGHUP)
    run.wait_for(" still works on requests after 0.3 s (front.drain_s); they are cut")
    run.wait_for("updated pd-0, pd-1")


def test_an_instance_that_does_not_come_back_ends_the_update_and_may_come_later(
    routed: Routed,
) -> None:
    run = routed(
        {**TWO, "pd-0": ["--ill-again={shm}"]},
        startup_timeout_s=6.0,
        pauses_s=(0.5, 0.5),
    )
    other = run.pid_of("pd-1")
    run.process.send_signal(signal.SIGHUP)
    run.wait_for(
        "the update has ended at pd-0: it is not healthy 8 s after its restart; updated: none"
    )
    assert run.pid_of("pd-1") == other
    assert drained(run) == ["pd-0"]
    # It is not kept out for ever.
    front = client_of(run)
    run.until(
        lambda: "draining" not in {each["state"] for each in front.instances()}, "it is resumed"
    )


def test_a_front_that_cannot_be_asked_ends_the_update_before_anything_has_happened(
    routed: Routed, tmp_path: Path
) -> None:
    cert = Path(shutil.copy(certifi.where(), tmp_path))
    run = routed(
        TWO,
        pauses_s=(60.0, 60.0),
        specs={"front": {"tls_cert_file": str(cert)}},
    )
    first = run.pid_of("pd-0")
    away = cert.rename(tmp_path / "away")
    run.process.send_signal(signal.SIGHUP)
    assert f"certificate {cert} cannot be used" in run.wait_for("the update has ended at pd-0")
    away.rename(cert)
    os.kill(run.pid_of("front"), signal.SIGKILL)
    run.wait_for("restarting it in 60 s")
    run.process.send_signal(signal.SIGHUP)
    line = run.wait_for("the update has ended at pd-0")
    assert "cannot be reached" in line and line.endswith("; updated: none")
    assert run.pid_of("pd-0") == first
    # Nor is one waited for that is dead.
    run.stop()


def test_what_dies_and_what_hangs_is_started_again_during_an_update(routed: Routed) -> None:
    run = routed(TWO, drain_s=60.0, hung_after_s=1.0, pauses_s=(0.1, 0.1))
    for _ in TWO:
        Asked(run, 8.0)
    run.process.send_signal(signal.SIGHUP)
    run.until(lambda: drained(run), "pd-0 drains")
    os.kill(run.pid_of("pd-1"), signal.SIGSTOP)
    run.wait_for("pd-1 has not answered")
    run.wait_for("pd-1 is back")
    run.wait_for("updated pd-0, pd-1")


def test_nothing_is_taken_out_while_another_is_away(routed: Routed) -> None:
    run = routed(TWO, pauses_s=(3.0, 3.0))
    os.kill(run.pid_of("pd-1"), signal.SIGKILL)
    run.wait_for("restarting")
    run.process.send_signal(signal.SIGHUP)
    run.wait_for("updating")
    time.sleep(0.7)
    assert drained(run) == []
    run.wait_for("pd-1 is back")
    run.wait_for("updated pd-0, pd-1")


def test_a_second_wish_for_an_update_and_one_while_starting_are_refused_and_a_stop_ends_it(
    routed: Routed,
) -> None:
    run = routed({**TWO, "pd-1": ["--late-start=1"]}, drain_s=600.0, until="pd-0: ")
    run.process.send_signal(signal.SIGHUP)
    run.wait_for("no update while the topology starts")
    run.wait_for("ready:")
    asked = [Asked(run, 3.0) for _ in range(2)]
    run.process.send_signal(signal.SIGHUP)
    run.wait_for("updating")
    run.process.send_signal(signal.SIGHUP)
    run.wait_for("an update is under way")
    run.stop()
    assert all("pid" in each.ended() for each in asked)


def with_terminal(routed: Routed, on_hangup: signal.Handlers) -> tuple[Any, int]:
    """Return a topology of a launcher with a terminal of its own, and the terminal's other end."""
    terminal, theirs = pty.openpty()

    def take_it() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, on_hangup)

    run = routed({"pd-0": []}, popen={"preexec_fn": take_it, "pass_fds": (theirs,)})
    os.close(theirs)
    return run, terminal


def test_a_closed_terminal_is_a_stop(routed: Routed) -> None:
    run, terminal = with_terminal(routed, signal.SIG_DFL)
    # With a terminal that is open it is an update.
    run.process.send_signal(signal.SIGHUP)
    run.wait_for("updated pd-0")
    os.close(terminal)
    run.wait_for("stopping")
    run.ends_well()


def test_a_closed_terminal_is_nothing_to_a_launcher_under_nohup(routed: Routed) -> None:
    run, terminal = with_terminal(routed, signal.SIG_IGN)
    os.close(terminal)
    time.sleep(0.5)
    # Nobody can close it once more.
    run.process.send_signal(signal.SIGHUP)
    run.wait_for("updated pd-0")
    assert not any("stopping" in line for line in run.lines)
    run.stop()
