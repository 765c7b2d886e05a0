"""SIGHUP for the launcher: every engine is restarted, and no request is lost."""

from __future__ import annotations

import itertools
import signal
import threading

from tests.faults.conftest import Served
from tests.faults.small.pictures import Picture
from tests.faults.topology import Reply, Topology
from tests.faults.traffic import check, requests

CLIENTS = 4


def schedulers(topology: Topology) -> set[int]:
    """Return the process of each engine's scheduler."""
    pids = topology.faults.folder / "pids"
    return {int((pids / f"{name}.scheduler").read_text()) for name in topology.names}


def test_update_under_load_loses_no_request(served: Served) -> None:
    topology = served.topology
    before, end = schedulers(topology), threading.Event()
    done: list[tuple[list[Picture], Reply]] = []

    def client(number: int) -> None:
        for turn in itertools.count():
            for pictures in requests(f"update/{number}/{turn}", 0, 4):
                if end.is_set():
                    return
                done.append((pictures, topology.ask(pictures)))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for each in clients:
        each.start()
    topology.process.send_signal(signal.SIGHUP)
    try:
        topology.wait_for(f"updated {', '.join(topology.names)}")
        served_by_then = len(done)
        topology.until(lambda: len(done) > served_by_then + CLIENTS, "requests are served")
    finally:
        end.set()
        for each in clients:
            each.join()
    asked, replies = zip(*done, strict=True)
    check(asked, replies, failures=False)
    assert not before & schedulers(topology)
    served.check_nothing_is_left()
