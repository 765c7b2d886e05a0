"""SIGKILL for every process of a topology at every named point of the protocol."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.faults.conftest import Served
from tests.faults.points import (
    ENCODER_WORKER,
    LAUNCHER,
    PD_WORKER,
    POINTS,
    ROUTER,
    VICTIMS,
    Victim,
)
from tests.faults.seeds import SEEDS
from tests.faults.topology import Topology
from tests.faults.traffic import check, requests, send, send_until_struck

REQUESTS = 8
SELDOM = ("request.arrived", "item.reserved", "transfer.written", "item.placed")
"""Points at which router and launcher hold nothing else than at the point before."""

IN_A_GROUP = {
    (victim, point)
    for victim in (ENCODER_WORKER, PD_WORKER)
    for point in ("transfer.begun", "transfer.written", "item.landed")
}
"""Where the two members of a group hold something of each other's; the rest with ``--full``."""


def case(victim: Victim, point: str) -> Any:
    """Return the parameters of one kill; those that say little more need ``--full``."""
    seldom = victim in (ROUTER, LAUNCHER) and point in SELDOM
    marks = pytest.mark.full if seldom else ()
    return pytest.param(victim, point, id=f"{victim}-{point}", marks=marks)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("victim", "point"),
    [case(victim, point) for victim in VICTIMS if victim is not LAUNCHER for point in POINTS],
)
def test_a_killed_process_costs_no_wrong_answer_and_leaves_nothing(
    served: Served, victim: Victim, point: str, seed: int
) -> None:
    kill_and_recover(served, victim, point, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("victim", "point"),
    [
        pytest.param(victim, point, marks=() if (victim, point) in IN_A_GROUP else pytest.mark.full)
        for victim in VICTIMS
        if victim is not LAUNCHER
        for point in POINTS
    ],
    ids=str,
)
def test_a_killed_member_of_a_group_costs_no_wrong_answer_and_leaves_nothing(
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
    check(asked, replies, failures=not encodes, broken=victim.role == "router")
    topology.until(topology.recovered, f"a new {victim} serves")
    again = requests(f"after {victim}/{point}", seed, REQUESTS)
    check(again, send(topology, again), failures=False)
    served.check_nothing_is_left()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("victim", "point"), [case(LAUNCHER, point) for point in POINTS])
def test_a_killed_launcher_leaves_nothing_whatever_is_under_way(
    tmp_path_factory: pytest.TempPathFactory, victim: Victim, point: str, seed: int
) -> None:
    path = random.Random(f"{point}/{seed}").choice(("shm", "tcp", "collective"))
    folder = tmp_path_factory.mktemp("launcher") / "run"
    topology = Topology(folder, encoders=(path,), prefills=(path,))
    try:
        asked = requests(f"launcher/{point}", seed, REQUESTS)
        topology.faults.arm(point, victim)
        check(asked, send(topology, asked), failures=True, broken=True)
        assert topology.faults.struck(), f"{point} was not passed"
        topology.until(topology.nothing_left, "the guard has ended everything")
    finally:
        topology.close()
