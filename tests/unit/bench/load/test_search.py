from __future__ import annotations

import math

import pytest

from epd_portable.bench.load.plan import SearchRange
from epd_portable.bench.load.search import Findings, GoodputSearch

RANGE = SearchRange(low=0.5, high=16.0, precision=0.1)


def found(capacities: dict[str, float]) -> tuple[dict[str, Findings], list[float]]:
    search = GoodputSearch.among(RANGE, capacities)
    measured: list[float] = []
    while (rate := search.next_rate()) is not None:
        assert len(measured) < 40, measured
        measured.append(rate)
        search.learn(rate, {side: rate <= most for side, most in capacities.items()})
    return search.sides, measured


@pytest.mark.parametrize("capacity", [0.6, 1.0, 3.7, 7.99, 8.0, 15.0])
def test_the_highest_rate_is_enclosed_as_closely_as_asked(capacity: float) -> None:
    (known,) = found({"ours": capacity})[0].values()
    assert known.met <= capacity < known.missed
    assert known.missed / known.met <= 1.1


def test_a_side_that_meets_every_rate_is_measured_at_the_highest() -> None:
    sides, measured = found({"ours": 100.0})
    assert (sides["ours"].met, sides["ours"].missed) == (16.0, math.inf)
    assert measured[-1] == 16.0


def test_a_side_that_meets_none_is_measured_at_the_lowest() -> None:
    sides, measured = found({"ours": 0.1})
    assert (sides["ours"].met, sides["ours"].missed) == (0.0, 0.5)
    assert measured[-1] == 0.5


def test_a_rate_is_measured_once_for_all_sides() -> None:
    sides, measured = found({"ours": 4.0, "replicas": 4.1, "upstream": 1.0})
    assert len(set(measured)) == len(measured)
    assert all(each.missed / each.met <= 1.1 for each in sides.values())
    alone = sum(len(found({"one": most})[1]) for most in (4.0, 4.1, 1.0))
    assert len(measured) < alone


RECORDED = {
    # A side that missed a rate by chance, and two that could not serve it: one round each.
    2.0: (True, True, True),
    2.18: (True, True, True),
    2.38: (False, False, False),
    2.83: (True, False, False),
    4.0: (True, False, False),
    4.36: (False, False, False),
    4.76: (False, False, False),
    5.66: (False, False, False),
}


def replayed(again: dict[float, bool]) -> tuple[Findings, list[float]]:
    """Search as recorded; the first side does otherwise when a rate is asked again."""
    sides = ("ours", "replicas", "upstream")
    search = GoodputSearch.among(SearchRange(low=2.0, high=8.0, precision=0.12), sides)
    asked: list[float] = []
    while (rate := search.next_rate()) is not None:
        near = min(RECORDED, key=lambda known: abs(known - rate))
        met = dict(zip(sides, RECORDED[near], strict=True))
        met["ours"] = again.get(near, met["ours"]) if rate in asked else met["ours"]
        search.learn(rate, met)
        asked.append(rate)
        assert len(asked) < 40, asked
    return search.sides["ours"], asked


def test_rates_that_contradict_each_other_are_asked_again_and_then_read_strictly() -> None:
    ours, asked = replayed({})
    twice = sorted({rate for rate in asked if asked.count(rate) > 1})
    assert len(twice) >= 2
    assert all(asked.count(rate) <= 2 for rate in asked)
    # Neighbours: the lower one was missed, the higher one met.
    assert (ours.rates[twice[0]], ours.rates[twice[1]]) == (False, True)
    assert ours.met < ours.missed == twice[0]
    assert ours.above and min(ours.above) > ours.missed


def test_a_rate_that_is_met_when_it_is_asked_again_is_met() -> None:
    ours, _ = replayed({2.38: True})
    assert ours.above == []
    assert ours.met >= 4.0
