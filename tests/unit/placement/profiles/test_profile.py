from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epd_portable.placement.instances import Instance
from epd_portable.placement.profiles.policy import Profile
from epd_portable.placement.profiles.selection_types import (
    MOST_SHOWN,
    Candidates,
    Decision,
    SelectionRequest,
)
from tests.unit.placement.profiles.situations import asked, with_load


class ByTable:
    """Filter, scorer and picker (of the last one) with answers from a table, by name."""

    def __init__(self, *answers: Any) -> None:
        self.answers = {f"i{n}": answer for n, answer in enumerate(answers)}

    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        return [each for each in candidates if self.answers[each.name]]

    def score(self, request: SelectionRequest, candidates: Candidates) -> Sequence[float]:
        return [self.answers[each.name] for each in candidates]

    def pick(
        self, request: SelectionRequest, candidates: Candidates, scores: Sequence[float]
    ) -> Instance:
        return self.answers.get("picked", candidates[-1])


A, B = ByTable(1.0, 0.0, 0.5), ByTable(0.0, 1.0, 0.8)


def profile(
    filters: Sequence[ByTable] = (), scorers: Sequence[tuple[ByTable, float]] = (), *picker: ByTable
) -> Profile:
    return Profile(
        "p",
        {f"f{n}": one for n, one in enumerate(filters)},
        {f"s{n}": one for n, one in enumerate(scorers)},
        *picker,
    )


def test_a_decision_says_what_each_plugin_said() -> None:
    one = profile([ByTable(1, 1, 0)], [(A, 1.0), (B, 2.0)], A)
    decision = Decision(stage="decode")
    assert one.choose(asked(), with_load(0, 0, 0), decision) is not None
    assert decision.shown() == {
        "stage": "decode",
        "profile": "p",
        "filters": {"there": 3, "f0": 2},
        "scores": {
            "i1": {"s0": 0.0, "s1": 2.0, "total": 2.0},
            "i0": {"s0": 1.0, "s1": 0.0, "total": 1.0},
        },
        "winner": "i1",
    }


def test_explanation_shows_the_best_candidates() -> None:
    decision = Decision(stage="encode", item="x" * 64)
    profile().choose(asked(), with_load(*[0] * 100), decision)
    shown = decision.shown()
    assert isinstance(shown["scores"], dict)
    assert (len(shown["scores"]), shown["item"]) == (MOST_SHOWN, "x" * 16)
    for filters, there, reason in (
        ([], 0, "there is no instance"),
        ([ByTable(1, 0), ByTable(0, 1)], 2, "no instance is left"),
    ):
        decision = Decision(stage="decode")
        assert profile(filters).choose(asked(), with_load(*[0] * there), decision) is None
        assert decision.shown()["reason"] == reason
