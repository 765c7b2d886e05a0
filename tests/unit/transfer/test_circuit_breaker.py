from __future__ import annotations

import pytest

from epd_portable.transfer.circuit_breaker import CircuitBreaker
from tests.unit.builders import Clock


def made(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(first_s=1.0, longest_s=5.0, clock=clock, chance=lambda: 0.5)


def test_breaker_opens_on_failure_and_allows_one_trial() -> None:
    clock = Clock()
    breaker = made(clock)
    assert breaker.allows() and breaker.state == "closed"
    assert [breaker.failed() for _ in range(10)] == [True] + [False] * 9
    assert (breaker.state, breaker.allows()) == ("open", False)
    clock.now += 1.01
    assert breaker.state == "half_open"
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    assert breaker.close()
    assert (breaker.state, breaker.allows()) == ("closed", True)
    assert not breaker.close()
    clock.now += 5.01
    breaker.failed()
    clock.now += 1.01
    assert breaker.allows(), "it begins with the shortest time again"


@pytest.mark.parametrize("answers", [False, True], ids=["never", "now and then"])
def test_every_failed_try_doubles_the_time_up_to_the_longest(answers: bool) -> None:
    clock = Clock()
    breaker = made(clock)
    breaker.failed()
    for expected_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        clock.now += 0.99 * expected_s
        assert not breaker.allows()
        clock.now += 0.02 * expected_s
        assert breaker.allows()
        assert not answers or breaker.close()
        assert breaker.failed() is answers


def test_processes_do_not_come_back_all_at_once() -> None:
    clock = Clock()
    early, late = (
        CircuitBreaker(first_s=1.0, clock=clock, chance=lambda at=at: at) for at in (0.0, 1.0)
    )
    early.failed()
    late.failed()
    clock.now += 1.0
    assert early.allows() and not late.allows()
