"""Clients that go away while their requests are under way."""

from __future__ import annotations

import random

import pytest

from tests.faults.conftest import Served
from tests.faults.leaving import ask_and_leave
from tests.faults.seeds import SEEDS
from tests.faults.topology import REQUEST_DEADLINE_S
from tests.faults.traffic import expected, requests

REQUESTS = 1000
AT_ONCE = 24
LEAVING = 100
LONGEST_PATIENCE_S = 0.3


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tenth_of_1000_clients_goes_away_and_the_others_are_answered(
    served: Served, seed: int
) -> None:
    topology = served.topology
    chance = random.Random(f"aborts/{seed}")
    asked = requests("aborts", seed, REQUESTS)
    leaving = chance.sample(range(REQUESTS), LEAVING)
    outcome = ask_and_leave(
        topology.url,
        [(topology.body(pictures), expected(pictures)) for pictures in asked],
        {place: chance.uniform(0.0, LONGEST_PATIENCE_S) for place in leaving},
        at_once=AT_ONCE,
        deadline_s=REQUEST_DEADLINE_S,
    )
    assert outcome.wrong == []
    assert outcome.left > LEAVING / 2
    served.check_nothing_is_left()
