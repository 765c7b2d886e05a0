"""SIGHUP: instances are started again one after the other, and no request is lost."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import termios
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.integration.launch.conftest import ROUTES, Asked

Launch = Callable[..., Any]


def topology(*engines: str, **options: list[str]) -> dict[str, list[str]]:
    """Return engines behind a router that drains them when it is asked to."""
    roles = {"encode": "encode", "pd": "prefill-decode"}
    routes = [
        f"--engine={name}={roles[name.partition('-')[0]]}=http://127.0.0.1:{{port[{name}]}}"
        for name in engines
    ]
    known = {name: options.get(name.replace("-", "_"), []) for name in engines}
    return {**known, "router": [ROUTES, *routes]}


class Load:
    """Clients that ask without a pause, each one request at a time."""

    def __init__(self, run: Any, clients: int = 8) -> None:
        self.answers: list[str] = []
        self._run = run
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._end.is_set():
            try:
                self.answers.append(self._run.ask("router", "/work/0.2"))
            except OSError as error:
                self.answers.append(repr(error))

    def ended(self) -> list[str]:
        """Return all answers, and errors as text."""
        self._end.set()
        for thread in self._threads:
            thread.join()
        return self.answers


def asked_of_router(run: Any) -> list[str]:
    text = (run.log_dir / "router.log").read_text()
    return re.findall(r"^(?:drain|resume) .*$", text, re.MULTILINE)


def test_an_update_under_load_loses_nothing(launch: Launch) -> None:
    run = launch(topology("pd-0", "pd-1", "pd-2"))
    run.wait_for("ready:")
    before = {name: run.pid_of(name) for name in ("pd-0", "pd-1", "pd-2", "router")}
    load = Load(run)
    run.process.send_signal(signal.SIGHUP)
    run.wait_for("updating pd-0, pd-1, pd-2, one after the other")
    run.wait_for("updated pd-0, pd-1, pd-2")
    after = {name: run.pid_of(name) for name in before}
    time.sleep(0.5)
    answers = [json.loads(answer) for answer in load.ended()]
    pids = Counter(answer["pid"] for answer in answers)
    assert len(answers) > 50
    engines = {pid for pids in (before, after) for name, pid in pids.items() if name != "router"}
    assert pids.keys() == engines
    assert before.keys() == {
        name for name in before if name == "router" or after[name] != before[name]
    }
    assert after["router"] == before["router"]
    names = ("pd-0", "pd-1", "pd-2")
    assert asked_of_router(run) == [
        f"{what} {name}" for name in names for what in ("drain", "resume")
    ]
    # To be asked to end was no death.
    assert not any("restarting" in line or "warning" in line for line in run.lines)
    assert run.stop(signal.SIGTERM) == 0
    assert run.nothing_left()


def test_who_is_alone_in_its_role_is_updated_all_the_same(launch: Launch) -> None:
    run = launch(topology("encode-0", "pd-0"))
    run.wait_for("ready:")
    first = run.pid_of("pd-0")
    run.process.send_signal(signal.SIGHUP)
    assert run.wait_for("warning: encode-0 is the only encode instance").endswith(
        "while it is away requests with media fall back to what can encode without it"
    )
    assert run.wait_for("warning: pd-0 is the only prefill-decode instance").endswith(
        "while it is away requests are answered 503"
    )
    run.wait_for("updated encode-0, pd-0")
    assert run.pid_of("pd-0") != first


def test_what_is_not_idle_within_the_grace_is_cut(launch: Launch) -> None:
    run = launch(topology("pd-0", "pd-1"), drain_s=0.3)
    run.wait_for("ready:")
    asked = Asked(run, 60.0)
    run.process.send_signal(signal.SIGHUP)
    run.wait_for("pd-0 still works on requests after 0.3 s (router.drain_s); they are cut")
    run.wait_for("updated pd-0, pd-1")
    assert "502" in asked.ended()


def test_an_instance_that_does_not_come_back_ends_the_update_and_may_come_later(
    launch: Launch,
) -> None:
    run = launch(
        topology("pd-0", "pd-1", pd_0=["--ill-again={shm}"]),
        startup_timeout_s=2.0,
        backoff={"first_s": 0.5, "max_s": 0.5},
    )
    run.wait_for("ready:")
    other = run.pid_of("pd-1")
    run.process.send_signal(signal.SIGHUP)
    run.wait_for(
        "the update has ended at pd-0: it is not healthy 4 s after its restart; updated: none"
    )
    assert run.pid_of("pd-1") == other
    # It is not kept out for ever.
    assert asked_of_router(run) == ["drain pd-0", "resume pd-0"]


def test_a_router_that_refuses_ends_the_update_before_anything_has_happened(
    launch: Launch,
) -> None:
    servers = topology("pd-0", "pd-1")
    servers["router"].append("--refuses")
    run = launch(servers)
    run.wait_for("ready:")
    first = run.pid_of("pd-0")
    run.process.send_signal(signal.SIGHUP)
    line = run.wait_for("the update has ended at pd-0")
    assert line.endswith(": not now; updated: none")
    assert run.pid_of("pd-0") == first


def test_what_dies_and_what_hangs_is_started_again_during_an_update(launch: Launch) -> None:
    run = launch(
        topology("pd-0", "pd-1"),
        drain_s=60.0,
        hung_after_s=1.0,
        backoff={"first_s": 0.1, "max_s": 0.1},
    )
    run.wait_for("ready:")
    asked = Asked(run, 4.0)
    run.process.send_signal(signal.SIGHUP)
    run.until(lambda: asked_of_router(run), "pd-0 drains")
    os.kill(run.pid_of("pd-1"), signal.SIGSTOP)
    run.wait_for("pd-1 has not answered")
    run.wait_for("pd-1 is back")
    run.wait_for("updated pd-0, pd-1")
    assert "pid" in asked.ended()


def test_nobody_is_taken_out_while_another_is_away(launch: Launch) -> None:
    run = launch(topology("pd-0", "pd-1"), backoff={"first_s": 1.5, "max_s": 1.5})
    run.wait_for("ready:")
    os.kill(run.pid_of("pd-1"), signal.SIGKILL)
    run.wait_for("restarting")
    run.process.send_signal(signal.SIGHUP)
    run.wait_for("updating")
    time.sleep(0.7)
    assert asked_of_router(run) == []
    run.wait_for("pd-1 is back")
    run.wait_for("updated pd-0, pd-1")


def test_a_stop_signal_ends_an_update(launch: Launch) -> None:
    run = launch(topology("pd-0", "pd-1"), drain_s=600.0)
    run.wait_for("ready:")
    asked = Asked(run, 1.0)
    run.process.send_signal(signal.SIGHUP)
    run.until(lambda: asked_of_router(run), "pd-0 drains")
    assert run.stop(signal.SIGTERM) == 0
    assert "pid" in asked.ended()
    assert run.nothing_left()


def test_a_second_wish_for_an_update_and_one_while_starting_are_refused(launch: Launch) -> None:
    run = launch(topology("pd-0", "pd-1", pd_1=["--late-start=1"]), drain_s=60.0)
    run.wait_for("pd-0: ")
    run.process.send_signal(signal.SIGHUP)
    run.wait_for("no update while the topology starts")
    run.wait_for("ready:")
    asked = Asked(run, 1.0)
    run.process.send_signal(signal.SIGHUP)
    run.wait_for("updating")
    run.process.send_signal(signal.SIGHUP)
    run.wait_for("an update is under way")
    assert "pid" in asked.ended()
    run.wait_for("updated pd-0, pd-1")


def with_terminal(launch: Launch, on_hangup: signal.Handlers) -> tuple[Any, int]:
    """Return a topology of a launcher with a terminal of its own, and the terminal's other end."""
    terminal, theirs = pty.openpty()

    def take_it() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, on_hangup)

    run = launch(topology("pd-0"), popen={"preexec_fn": take_it, "pass_fds": (theirs,)})
    os.close(theirs)
    run.wait_for("ready:")
    return run, terminal


def test_a_closed_terminal_is_a_stop(launch: Launch) -> None:
    run, terminal = with_terminal(launch, signal.SIG_DFL)
    # With a terminal that is open it is an update.
    run.process.send_signal(signal.SIGHUP)
    run.wait_for("updated pd-0")
    os.close(terminal)
    run.wait_for("stopping")
    assert run.process.wait(30) == 0
    assert run.nothing_left()


def test_a_closed_terminal_is_nothing_to_a_launcher_under_nohup(launch: Launch) -> None:
    run, terminal = with_terminal(launch, signal.SIG_IGN)
    os.close(terminal)
    time.sleep(0.5)
    # Nobody can close it once more.
    run.process.send_signal(signal.SIGHUP)
    run.wait_for("updated pd-0")
    assert not any("stopping" in line for line in run.lines)
    assert run.stop(signal.SIGTERM) == 0
