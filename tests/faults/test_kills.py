"""SIGKILL for every process of a topology at every named point of the protocol."""

from __future__ import annotations

import random

import pytest

from epd_portable.transfer import registry
from tests.faults.conftest import Served
from tests.faults.points import (
    ENCODER_SCHEDULER,
    ENCODER_WORKER,
    FRONT,
    LAUNCHER,
    PD_SCHEDULER,
    PD_WORKER,
    POINTS,
    VICTIMS,
    Victim,
)
from tests.faults.seeds import SEEDS
from tests.faults.topology import Topology
from tests.faults.traffic import check, requests, send, send_until_struck

REQUESTS = 8
PATHS = [
    path
    for path in ("shm", "tcp", "collective", "nixl")
    if not registry.missing(registry.entry(path))
]
ALWAYS = {
    (ENCODER_WORKER, "transfer.begun"),
    (ENCODER_SCHEDULER, "encode_job"),
    (PD_WORKER, "transfer.begun"),
    (PD_WORKER, "item.landed"),
    (PD_SCHEDULER, "transfer.written"),
    (FRONT, "encode.begin"),
}
"""Points at which a death takes most from other processes; the rest with ``--full``."""
ALWAYS_IN_A_GROUP = {(ENCODER_WORKER, "transfer.begun"), (PD_WORKER, "transfer.begun")}
"""Points at which the other member of a group relies on the dead; the rest with ``--full``."""
CASES = [(victim, point) for victim in VICTIMS if victim is not LAUNCHER for point in POINTS]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("victim", "point"),
    [pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.full) for case in CASES],
    ids=str,
)
def test_killed_process_costs_no_wrong_answer_and_leaves_nothing(
    served: Served, victim: Victim, point: str, seed: int
) -> None:
    kill_and_recover(served, victim, point, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("victim", "point"),
    [
        pytest.param(*case, marks=() if case in ALWAYS_IN_A_GROUP else pytest.mark.full)
        for case in CASES
    ],
    ids=str,
)
def test_killed_group_member_costs_no_wrong_response(
    by_collective: Served, victim: Victim, point: str, seed: int
) -> None:
    kill_and_recover(by_collective, victim, point, seed)


def kill_and_recover(served: Served, victim: Victim, point: str, seed: int) -> None:
    """Kill one process while requests are under way; ask more when it is back."""
    topology = served.topology
    chance = random.Random(f"{victim}/{point}/{seed}")
    topology.faults.arm(point, victim, nth=chance.randint(1, 3), other=chance.randint(0, 1))
    asked, replies = send_until_struck(topology, f"{victim}/{point}", seed, REQUESTS)
    encodes = victim.role == "encode-"
    check(asked, replies, failures=not encodes, broken=victim is FRONT)
    topology.until(topology.recovered, f"a new {victim} serves")
    again = requests(f"after {victim}/{point}", seed, REQUESTS)
    check(again, send(topology, again), failures=False)
    served.check_nothing_is_left()


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_launcher_leaves_nothing_whatever_is_under_way(
    tmp_path_factory: pytest.TempPathFactory, point: str, seed: int
) -> None:
    """`test_clock` kills one every time, at the end of a topology that it has anyhow."""
    path = random.Random(f"{point}/{seed}").choice(PATHS)
    folder = tmp_path_factory.mktemp("launcher") / "run"
    topology = Topology(folder, encoders=(path,), prefills=(path,))
    try:
        asked = requests(f"launcher/{point}", seed, REQUESTS)
        topology.faults.arm(point, LAUNCHER)
        check(asked, send(topology, asked), failures=True, broken=True)
        assert topology.faults.struck(), f"{point} was not passed"
        topology.until(topology.nothing_left, "the guard has ended everything")
    finally:
        topology.close()
