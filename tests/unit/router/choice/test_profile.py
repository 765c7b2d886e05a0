from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest

from epd_portable.router.choice.profile import LOG_EVERY_S, Profile
from epd_portable.router.choice.selection_types import (
    MOST_SHOWN,
    Candidate,
    Candidates,
    Decision,
    SelectionRequest,
)
from tests.unit.router.choice.situations import asked, with_load


class ByTable:
    """Filter, scorer and picker with answers from a table, by name."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        return [each for each in candidates if self.answers[each.name]]

    def score(self, request: SelectionRequest, candidates: Candidates) -> Sequence[float]:
        return [self.answers[each.name] for each in candidates]


class Last:
    def pick(
        self, request: SelectionRequest, candidates: Candidates, scores: Sequence[float]
    ) -> Candidate:
        return candidates[-1]


class Raising:
    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        raise KeyError("filter")

    def score(self, request: SelectionRequest, candidates: Candidates) -> Sequence[float]:
        raise KeyError("scorer")

    def pick(
        self, request: SelectionRequest, candidates: Candidates, scores: Sequence[float]
    ) -> Candidate:
        raise KeyError("picker")


def of(name: str, *answers: Any) -> dict[str, Any]:
    return {f"i{n}": answer for n, answer in enumerate(answers)}


A, B = ByTable(of("a", 1.0, 0.0, 0.5)), ByTable(of("b", 0.0, 1.0, 0.8))


@pytest.mark.parametrize(
    ("filters", "scorers", "winner"),
    [
        ([], [(A, 1.0)], "i0"),
        ([], [(A, 1.0), (B, 1.0)], "i2"),
        ([], [(A, 1.0), (B, 5.0)], "i1"),
        ([(1, 1, 0)], [(A, 1.0), (B, 1.1)], "i1"),
        ([(1, 1, 0), (1, 0, 1)], [(A, 1.0), (B, 5.0)], "i0"),
        ([(0, 0, 0)], [(A, 1.0)], ""),
        ([(0, 1, 0)], [], "i1"),
    ],
)
def test_filters_then_scores_times_weights_then_the_picker(
    filters: list[tuple[int, ...]], scorers: list[tuple[ByTable, float]], winner: str
) -> None:
    profile = Profile(
        "p",
        {f"f{n}": ByTable(of("f", *answers)) for n, answers in enumerate(filters)},
        {f"s{n}": one for n, one in enumerate(scorers)},
    )
    decision = Decision(stage="decode")
    candidates = with_load(0, 0, 0)
    chosen = profile.choose(asked(), candidates, decision)
    assert (chosen.name if chosen else "") == winner == decision.winner
    assert bool(decision.reason) == (not winner)
    # It is the same when nobody wants to know why.
    assert profile.choose(asked(), candidates) is chosen


def test_a_decision_says_what_each_plugin_said() -> None:
    kept = ByTable(of("f", 1, 1, 0))
    profile = Profile("p", {"kept": kept}, {"a": (A, 1.0), "b": (B, 2.0)}, ("last", Last()))
    decision = Decision(stage="decode")
    assert profile.choose(asked(), with_load(0, 0, 0), decision) is not None
    assert decision.shown() == {
        "stage": "decode",
        "profile": "p",
        "filters": {"there": 3, "kept": 2},
        "scores": {
            "i1": {"a": 0.0, "b": 2.0, "total": 2.0},
            "i0": {"a": 1.0, "b": 0.0, "total": 1.0},
        },
        "winner": "i1",
    }


def test_of_many_instances_the_best_are_shown() -> None:
    decision = Decision(stage="encode", item="x" * 64)
    Profile("p", {}, {}).choose(asked(), with_load(*[0] * 100), decision)
    shown = decision.shown()
    assert isinstance(shown["scores"], dict)
    assert len(shown["scores"]) == MOST_SHOWN
    assert shown["item"] == "x" * 16


def test_nobody_is_chosen_where_nobody_is() -> None:
    decision = Decision(stage="decode")
    assert Profile("p", {}, {}).choose(asked(), [], decision) is None
    assert decision.shown()["reason"] == "there is no instance"


@pytest.mark.parametrize(
    "answers", [(1.0, math.nan, 0.0), ("much", 0.0, 0.0), (None, 0.0, 0.0), (math.inf, 0.0, 0.0)]
)
def test_a_scorer_that_answers_no_numbers_is_left_out(
    answers: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    scorers = {"odd": (ByTable(of("s", *answers)), 9.0), "b": (B, 1.0)}
    chosen = Profile("p", {}, scorers).choose(asked(), with_load(0, 0, 0))
    assert chosen is not None and chosen.name == "i1"
    assert "plug-in odd has failed" in caplog.text


def test_scores_beyond_0_and_1_count_as_these() -> None:
    scorers = {"odd": (ByTable(of("s", 100.0, -100.0, 1.0)), 1.0)}
    decision = Decision(stage="decode")
    Profile("p", {}, scorers).choose(asked(), with_load(0, 0, 0), decision)
    assert decision.totals == {"i0": 1.0, "i1": 0.0, "i2": 1.0}


def test_a_plugin_that_raises_stops_no_request_and_is_said_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Raising()
    profile = Profile("p", {"f": one}, {"s": (one, 1.0), "b": (B, 1.0)}, ("q", one))
    now = [0.0]
    monkeypatch.setattr("epd_portable.router.choice.profile.time.monotonic", lambda: now[0])
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            chosen = profile.choose(asked(), with_load(0, 0, 0))
            assert chosen is not None and chosen.name == "i1"
        assert len(caplog.records) == 3
        now[0] = LOG_EVERY_S + 1
        profile.choose(asked(), with_load(0, 0, 0))
        assert len(caplog.records) == 6


def test_a_picker_that_answers_somebody_else_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Stranger:
        def pick(
            self, request: SelectionRequest, candidates: Candidates, scores: Sequence[float]
        ) -> Candidate:
            return with_load(0)[0]

    chosen = Profile("p", {}, {"b": (B, 1.0)}, ("q", Stranger())).choose(
        asked(), with_load(0, 0, 0)
    )
    assert chosen is not None and chosen.name == "i1"
    assert "plug-in q has failed" in caplog.text
