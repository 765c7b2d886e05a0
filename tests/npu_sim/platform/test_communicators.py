"""Communicators as HCCL sees them: how large, how many at a time, and whether they go again."""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from epd_portable.errors import PeerLostError, PlatformError, TransportTimeoutError
from epd_portable.platforms.base import Platform
from epd_portable.platforms.collectives import Rendezvous, RendezvousHost
from epd_portable.platforms.npu import NpuPlatform
from tests.contract.remote_ranks import RankProcess
from tests.npu_sim.platform.children import run

AMPLE_S = 60.0
SHORT_S = 2.0
ROUNDS = 20
PROCESSES = 3
GROUPS = 2 * (3 + ROUNDS)
"""Groups of each process: one with each of the two others in every round."""

SCRIPT = """
import os
os.dup2(1, 2)
from tests.npu_sim.platform.communicators_script import main
main({rounds})
"""


@pytest.fixture(scope="module")
def observer(tmp_path_factory: pytest.TempPathFactory) -> str:
    library = tmp_path_factory.mktemp("observer") / "observer.so"
    source = Path(__file__).with_name("hccl_observer.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return str(library)


@pytest.fixture(scope="module")
def printed(observer: str) -> str:
    """Return the output of the three processes and the observer in many rounds."""
    return run(SCRIPT.format(rounds=ROUNDS), LD_PRELOAD=observer)


def events(printed: str) -> dict[str, list[tuple[str, int]]]:
    """Return what happened in each process, in order."""
    found: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for line in printed.splitlines():
        if line.startswith("@@ "):
            _, process, what, number = line.split()
            found[process].append((what, int(number)))
    return found


def test_communicators_of_a_process_are_made_one_at_a_time(printed: str) -> None:
    found = events(printed)
    assert len(found) == PROCESSES
    for happened in found.values():
        making = [what for what, _ in happened if what != "destroyed"]
        assert making == ["begun", "made"] * GROUPS


def test_every_communicator_is_destroyed_when_its_group_closes(printed: str) -> None:
    # What is left until a process ends is destroyed there.
    while_all_live = printed.partition("AFTER")[0]
    found = events(while_all_live)
    assert len(found) == PROCESSES
    for happened in found.values():
        assert [what for what, _ in happened].count("destroyed") == GROUPS


def test_groups_leave_no_device_memory_behind(printed: str) -> None:
    before, after = (
        line.partition(" ")[2]
        for line in printed.splitlines()
        if line.startswith(("BEFORE", "AFTER"))
    )
    assert before == after
    assert before.count("[") == 1 + PROCESSES


@pytest.fixture(scope="module")
def printed_beside_a_setting(observer: str) -> str:
    """Return the output of a few rounds if torch_npu makes communicators of a pair at will."""
    return run(SCRIPT.format(rounds=0), LD_PRELOAD=observer, P2P_HCCL_BUFFSIZE="77")


@pytest.mark.parametrize(("when", "groups"), [("printed", GROUPS), ("printed_beside_a_setting", 6)])
def test_communicator_ignores_buffer_size_of_the_environment(
    request: pytest.FixtureRequest, when: str, groups: int
) -> None:
    found = events(request.getfixturevalue(when))
    assert len(found) == PROCESSES
    for happened in found.values():
        assert [number for what, number in happened if what == "begun"] == [32] * groups
        assert [number for what, number in happened if what == "made"] == [2] * groups


@pytest.fixture
def host() -> Iterator[RendezvousHost]:
    made = RendezvousHost()
    yield made
    made.close()


def place(host: RendezvousHost, rank: int) -> Rendezvous:
    return Rendezvous(host=host.host, port=host.port, name="pair", rank=rank)


def test_group_times_out_while_another_group_is_made(npu: Platform, host: RendezvousHost) -> None:
    turns = NpuPlatform.turns
    assert turns is not None
    with closing(RankProcess()) as other, ThreadPoolExecutor(1) as pool:
        assert turns._lock.acquire(timeout=SHORT_S)
        try:
            far = pool.submit(
                other.join, "npu", place(host, 1), index=1, timeout_s=SHORT_S + AMPLE_S
            )
            start_s = time.monotonic()
            with pytest.raises(TransportTimeoutError, match="being made, one at a time, for all"):
                npu.new_group(place(host, 0), index=0, timeout_s=SHORT_S)
            assert SHORT_S <= time.monotonic() - start_s < AMPLE_S
            # The other end does not wait for its own deadline, which is far away.
            assert isinstance(far.exception(AMPLE_S / 2), PeerLostError)
        finally:
            turns._lock.release()


def test_two_ranks_of_a_group_in_one_process_are_refused(
    npu: Platform, host: RendezvousHost
) -> None:
    with ThreadPoolExecutor(2) as pool:
        joins = [
            pool.submit(npu.new_group, place(host, rank), index=rank, timeout_s=AMPLE_S)
            for rank in (0, 1)
        ]
    for join in joins:
        with pytest.raises((PlatformError, PeerLostError)):
            join.result()
    assert any(isinstance(join.exception(), PlatformError) for join in joins)
