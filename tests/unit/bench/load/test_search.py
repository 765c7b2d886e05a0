from __future__ import annotations

import math

import pytest

from epd_portable.bench.load.plan import SearchRange
from epd_portable.bench.load.search import Bracket, GoodputSearch

RANGE = SearchRange(low=0.5, high=16.0, precision=0.1)


def found(capacities: dict[str, float]) -> tuple[dict[str, Bracket], list[float]]:
    search = GoodputSearch.among(RANGE, capacities)
    measured: list[float] = []
    while (rate := search.next_rate()) is not None:
        assert len(measured) < 40, measured
        measured.append(rate)
        search.learn(rate, {side: rate <= most for side, most in capacities.items()})
    return search.brackets, measured


@pytest.mark.parametrize("capacity", [0.6, 1.0, 3.7, 7.99, 8.0, 15.0])
def test_the_highest_rate_is_enclosed_as_closely_as_asked(capacity: float) -> None:
    (bracket,) = found({"ours": capacity})[0].values()
    assert bracket.met <= capacity < bracket.missed
    assert bracket.missed / bracket.met <= 1.1


def test_a_side_that_meets_every_rate_is_measured_at_the_highest() -> None:
    brackets, measured = found({"ours": 100.0})
    assert brackets["ours"] == Bracket(met=16.0, missed=math.inf)
    assert measured[-1] == 16.0


def test_a_side_that_meets_none_is_measured_at_the_lowest() -> None:
    brackets, measured = found({"ours": 0.1})
    assert brackets["ours"] == Bracket(met=0.0, missed=0.5)
    assert measured[-1] == 0.5


def test_a_rate_is_measured_once_for_all_sides() -> None:
    brackets, measured = found({"ours": 4.0, "replicas": 4.1, "upstream": 1.0})
    assert len(set(measured)) == len(measured)
    assert all(each.missed / each.met <= 1.1 for each in brackets.values())
    alone = sum(len(found({"one": most})[1]) for most in (4.0, 4.1, 1.0))
    assert len(measured) < alone


def test_noise_outside_what_is_known_changes_nothing() -> None:
    bracket = Bracket(met=4.0, missed=5.0)
    bracket.learn(6.0, met=True)
    bracket.learn(2.0, met=False)
    assert bracket == Bracket(met=4.0, missed=5.0)
