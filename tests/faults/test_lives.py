"""Two encoders and two PD instances under a load that goes on: one of each is killed."""

from __future__ import annotations

import contextlib
import os
import signal

import psutil

from tests.faults.conftest import Served
from tests.faults.small.pictures import Picture
from tests.faults.topology import Reply, Topology
from tests.faults.traffic import check, requests, send
from tests.kit.load import Load

CLIENTS = 6
MORE = 6
"""Requests that are answered after each event, before the next one."""


def texts_and_pictures(topology: Topology, name: str) -> Load[tuple[list[Picture], Reply]]:
    """Let clients send requests, of which a third has no picture."""

    def send(number: int) -> tuple[list[Picture], Reply]:
        pictures = [] if number % 3 == 0 else requests(name, number, 1)[0]
        return pictures, topology.ask(pictures)

    return Load(send, clients=CLIENTS)


def servers(topology: Topology) -> dict[str, int]:
    """Return the first process of each instance."""
    found = {}
    for child in psutil.Process(topology.process.pid).children(recursive=True):
        name = ""
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # It has just ended.
            if os.getsid(child.pid) == child.pid:
                name = child.environ().get("EPD_INSTANCE", "")
        if name in topology.names:
            found[name] = child.pid
    return found


def until_new(topology: Topology, name: str, pid: int) -> None:
    """Wait until another process of an instance serves."""
    topology.until(
        lambda: servers(topology).get(name, pid) != pid and topology.recovered(), f"{name} is back"
    )


def test_processes_of_each_kind_return_after_kills_under_load(served: Served) -> None:
    topology = served.topology
    before = servers(topology)
    with texts_and_pictures(topology, "killed under load") as load:
        load.wait_for(CLIENTS + MORE)
        for name in ("encode-1", "prefill_decode-0"):
            os.kill(before[name], signal.SIGKILL)
            load.wait_for(CLIENTS + MORE)
            until_new(topology, name, before[name])
            load.wait_for(CLIENTS + MORE)
    answered = check(*zip(*load.seen, strict=True), failures=True)
    lost = len(load.seen) - answered
    # What the PD instance worked on when it was killed, and what was sent until that was noticed.
    assert lost <= 2 * CLIENTS, [reply for _, reply in load.seen if reply.status != 200]
    again = requests("after the lives", 0, MORE)
    check(again, send(topology, again), failures=False)
    served.check_nothing_is_left()
