"""What is done about failures."""

from __future__ import annotations

from epd_portable.delivery.fallbacks import FALLBACKS, RequestPhase, RetryBudget
from epd_portable.wire.outcomes import FailureKind


def test_every_failure_has_its_fallbacks_wherever_it_can_be_met() -> None:
    assert {kind for _, kind in FALLBACKS} == set(FailureKind)
    final = {"unavailable", "refused", "error", "timeout", "incomplete", "local"}
    for (phase, _), fallbacks in FALLBACKS.items():
        # What is always possible stands last, and nowhere else.
        assert [each in final for each in fallbacks] == [False] * (len(fallbacks) - 1) + [True]
        # Once headers of an answer have come, nothing is sent again.
        assert phase is not RequestPhase.STREAM or fallbacks == ("incomplete",)


def test_retries_are_a_part_of_what_comes() -> None:
    budget = RetryBudget()
    at_once = sum(budget.spend() for _ in range(1000))
    for _ in range(1000):
        budget.count_request()
    later = sum(budget.spend() for _ in range(1000))
    assert (at_once, later) == (100, 100)
    for _ in range(10):
        budget.count_request()
    assert sum(budget.spend() for _ in range(10)) == 2
