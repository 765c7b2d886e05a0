"""Clients that go away while their requests are under way."""

from __future__ import annotations

import random

import pytest

from tests.faults.conftest import Served
from tests.faults.leaving import ask_and_leave
from tests.faults.seeds import SEEDS
from tests.faults.topology import REQUEST_DEADLINE_S
from tests.faults.traffic import expected, requests

AT_ONCE = 24
LONGEST_PATIENCE_S = 0.3


@pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("seed", SEEDS)
def test_tenth_of_all_clients_disconnects_and_others_are_served(
    served: Served, seed: int, count: int
) -> None:
    topology = served.topology
    chance = random.Random(f"aborts/{seed}")
    asked = requests("aborts", seed, count)
    leaving = chance.sample(range(count), count // 10)
    outcome = ask_and_leave(
        topology.url,
        [(topology.body(pictures), expected(pictures)) for pictures in asked],
        {place: chance.uniform(0.0, LONGEST_PATIENCE_S) for place in leaving},
        at_once=AT_ONCE,
        deadline_s=REQUEST_DEADLINE_S,
    )
    assert outcome.wrong == []
    # The faster a machine is, the more are answered before they have gone.
    assert outcome.left > len(leaving) / 5
    served.check_nothing_is_left()
