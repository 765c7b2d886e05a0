from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from queue import Empty, Queue

import pytest
import torch

from epd_portable.demo.servers import free_port
from epd_portable.errors import EPDError, PeerLostError, PlatformError, TransportTimeoutError
from epd_portable.platforms.collectives import CollectiveGroup, Deadline, Rendezvous, RendezvousHost
from epd_portable.platforms.collectives_device import Turns

CPU = torch.device("cpu")


def meet(port: int, *, timeout_s: float) -> CollectiveGroup:
    where = Rendezvous(host="127.0.0.1", port=port, name="pair", rank=0)
    return CollectiveGroup(where, device=CPU, timeout_s=timeout_s)


def test_a_host_that_is_not_there_is_told_at_once() -> None:
    port = free_port()
    with pytest.raises(PeerLostError, match=f"nothing listens at 127.0.0.1:{port}"):
        meet(port, timeout_s=20)


def test_host_that_never_replies_is_an_error_at_the_deadline() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(TransportTimeoutError, match=r"did not come within 0\.5 s"),
    ):
        meet(silent.getsockname()[1], timeout_s=0.5)


def test_a_host_takes_a_free_port_on_its_own_address_only() -> None:
    host = RendezvousHost("127.0.0.1")
    with socket.create_connection(("127.0.0.1", host.port), 5):
        pass
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", host.port), 5)
    host.close()


def test_a_port_in_use_is_refused() -> None:
    host = RendezvousHost()
    with pytest.raises(PlatformError, match=f"cannot listen at 127.0.0.1:{host.port}"):
        RendezvousHost(port=host.port)
    host.close()


@pytest.mark.parametrize("rank", [2, -1])
def test_a_rendezvous_is_for_one_of_two_ranks(rank: int) -> None:
    with pytest.raises(ValueError, match="ranks of a group are 0 and 1"):
        Rendezvous(host="127.0.0.1", port=1, name="pair", rank=rank)


def test_torchs_default_process_group_is_not_touched() -> None:
    host = RendezvousHost()
    with pytest.raises(TransportTimeoutError):
        meet(host.port, timeout_s=0.1)
    assert not torch.distributed.is_initialized()
    host.close()


AMPLE_S = 20.0
SHORT_S = 0.2
Take = Callable[[float], AbstractContextManager[None]]


def pair(first: Turns, second: Turns) -> tuple[Take, Take]:
    """Connect two processes that make one group; each end takes a number of seconds."""
    to_first: Queue[str] = Queue()
    to_second: Queue[str] = Queue()

    def end(turns: Turns, inbox: Queue[str], outbox: Queue[str]) -> Take:
        def take(timeout_s: float) -> AbstractContextManager[None]:
            return turns.with_peer(Channel(inbox, outbox, timeout_s), Deadline(timeout_s))

        return take

    return end(first, to_first, to_second), end(second, to_second, to_first)


class Channel:
    """Words through queues."""

    def __init__(self, inbox: Queue[str], outbox: Queue[str], timeout_s: float) -> None:
        self._inbox, self.put, self._timeout_s = inbox, outbox.put, timeout_s

    def get(self) -> str:
        with suppress(Empty):
            if word := self._inbox.get(timeout=self._timeout_s):
                return word
        raise PeerLostError("nothing heard")


def ordered() -> tuple[Turns, Turns]:
    """Return two processes; the first is asked first."""
    first, second = sorted((Turns(), Turns()), key=lambda turns: turns._token)
    return first, second


@pytest.mark.parametrize("count", [3, 4])
def test_ring_of_processes_forms_groups_without_deadlock(count: int) -> None:
    processes = [Turns() for _ in range(count)]
    inside = [0] * count

    def make(take: Take, process: int, both: threading.Barrier) -> None:
        with take(AMPLE_S):
            inside[process] += 1
            assert inside[process] == 1, "two groups of one process at once"
            both.wait(AMPLE_S)
            inside[process] -= 1
            both.wait(AMPLE_S)

    for _ in range(50):
        with ThreadPoolExecutor(2 * count) as pool:
            calls = []
            for one, other in itertools.pairwise([*range(count), 0]):
                takes = pair(processes[one], processes[other])
                both = threading.Barrier(2)
                for take, process in zip(takes, (one, other), strict=True):
                    calls.append(pool.submit(make, take, process, both))
            for call in calls:
                call.result()


@pytest.mark.parametrize("busy", [0, 1], ids=["the one asked first", "the other one"])
def test_turn_that_does_not_come_in_time_is_error_at_deadline(busy: int) -> None:
    processes = ordered()
    takes = pair(*processes)

    def attempt(take: Take) -> None:
        with take(SHORT_S):
            pytest.fail("both had their turn")

    assert processes[busy]._lock.acquire(timeout=AMPLE_S)
    with ThreadPoolExecutor(2) as pool:
        found = [call.exception() for call in [pool.submit(attempt, take) for take in takes]]
    assert isinstance(found[busy], TransportTimeoutError)
    assert "were being made, one at a time, for all of 0.2 s" in str(found[busy])
    # The other end's channel fails, and it does not keep its turn either.
    assert isinstance(found[1 - busy], EPDError)
    assert processes[1 - busy]._lock.acquire(timeout=AMPLE_S)


def test_a_turn_is_given_back_when_the_making_fails() -> None:
    takes = pair(*ordered())

    def fail(take: Take) -> None:
        with take(AMPLE_S):
            raise PeerLostError("the library failed")

    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            found = [call.exception() for call in [pool.submit(fail, take) for take in takes]]
        assert [type(error) for error in found] == [PeerLostError] * 2


def test_two_ranks_of_a_group_in_one_process_are_refused_at_once() -> None:
    process = Turns()

    def attempt(take: Take) -> None:
        with take(AMPLE_S):
            pytest.fail("one process had its turn twice")

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(attempt, take) for take in pair(process, process)]
    for call in calls:
        with pytest.raises(PlatformError, match="put each rank in a process of its own"):
            call.result()
