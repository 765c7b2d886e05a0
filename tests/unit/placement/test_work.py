"""Estimates of responses, and shares of an instance's time."""

from __future__ import annotations

import pytest

from epd_portable.placement.estimates import ResponseTimes, Work
from tests.unit.builders import Clock

ROLE = "prefill-decode"


def answered(load: ResponseTimes, clock: Clock, at_once: int, each_s: float, tokens: int) -> None:
    """Let an instance compute so many answers at the same time."""
    began_s = [load.begin() for _ in range(at_once)]
    clock.now += each_s
    for since_s in began_s:
        load.observe(tokens, since_s)
        load.end()


def test_concurrent_responses_share_time_equally() -> None:
    clock = Clock()
    load = ResponseTimes(Work(), ROLE, clock)
    first = load.begin()
    clock.now += 4
    second = load.begin()
    clock.now += 6
    assert load.each_s() - first == pytest.approx(4 + 3)
    load.end()
    clock.now += 1
    assert load.each_s() - second == pytest.approx(3 + 1)
    load.end()
    clock.now += 50
    assert load.each_s() - second == pytest.approx(3 + 1), "then it computed nothing"


def test_response_estimate_is_that_of_the_highest_load() -> None:
    work, clock = Work(), Clock()
    load = ResponseTimes(work, ROLE, clock)
    assert load.expected_ms(100) == 0
    answered(load, clock, 1, 2.0, 100)
    assert load.expected_ms(100) == 2000
    for _ in range(200):
        answered(load, clock, 10, 4.0, 100)
    assert load.expected_ms(100) == pytest.approx(400, rel=0.1)
    for _ in range(100):
        answered(load, clock, 1, 2.0, 100)
    assert load.expected_ms(100) == pytest.approx(400 * 1.001**100, rel=0.1), "slowly forgotten"
    for _ in range(3000):
        answered(load, clock, 1, 2.0, 100)
    assert load.expected_ms(100) == pytest.approx(2000)
    # Others of about that size are taken for the same, much longer ones are not known.
    assert load.expected_ms(250) == load.expected_ms(100)
    assert load.expected_ms(1000) == 0


def test_arrived_work_is_counted_by_the_estimate_of_its_time() -> None:
    work = Work()
    work.prompt_came(ROLE, 100)
    work.observe_response(ROLE, 100, 3.0)
    for _ in range(2):
        work.prompt_came(ROLE, 100)
    assert work.came_s == {(ROLE, "text", 7): 6.0}
