"""Two encoders and two PD instances under a load that goes on: one of each dies and comes back, and
all of them are started anew, one after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator

import psutil
import pytest

from tests.faults.conftest import Served
from tests.faults.small.pictures import Picture
from tests.faults.topology import Reply, Topology
from tests.faults.traffic import check, requests, send

CLIENTS = 6
MORE = 6
"""Requests that are answered after each event, before the next one."""
PAUSE_S = 0.05
"""Seconds between two requests of a client: without a pause, clients compute during each start."""


class MixedLoad:
    """Clients that ask, each its next question when it has an answer: texts, and pictures."""

    def __init__(self, topology: Topology, name: str) -> None:
        self._topology = topology
        self._asked = itertools.count()
        self._end = threading.Event()
        self._name = name
        self.seen: list[tuple[list[Picture], Reply]] = []
        self._clients = [threading.Thread(target=self._go_on) for _ in range(CLIENTS)]

    def _go_on(self) -> None:
        while not self._end.wait(PAUSE_S):
            number = next(self._asked)
            pictures = [] if number % 3 == 0 else requests(self._name, number, 1)[0]
            self.seen.append((pictures, self._topology.ask(pictures)))

    def more(self) -> None:
        """Wait for answers that were asked for and given from now on."""
        wanted = len(self.seen) + CLIENTS + MORE
        self._topology.until(lambda: len(self.seen) >= wanted, "answers go on")

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        for client in self._clients:
            client.start()
        try:
            yield
        finally:
            self._end.set()
            for client in self._clients:
                client.join()

    def check(self, *, failures: bool) -> int:
        """Check all answers, see `traffic.check`."""
        return check(*zip(*self.seen, strict=True), failures=failures)


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


@pytest.mark.parametrize("killed", [("encode-1", "prefill_decode-0")], ids=str)
def test_processes_of_each_kind_return_after_kills_under_load(
    served: Served, killed: tuple[str, ...]
) -> None:
    topology = served.topology
    load = MixedLoad(topology, f"killed/{killed}")
    before = servers(topology)
    with load.going_on():
        load.more()
        for name in killed:
            os.kill(before[name], signal.SIGKILL)
            load.more()
            until_new(topology, name, before[name])
            load.more()
    answered = load.check(failures=True)
    lost = len(load.seen) - answered
    # What the PD instance worked on when it was killed, and what was sent until that was noticed.
    assert lost <= 2 * CLIENTS, [reply for _, reply in load.seen if reply.status != 200]
    again = requests("after the lives", 0, MORE)
    check(again, send(topology, again), failures=False)
    served.check_nothing_is_left()
