"""Estimates of responses, of shares of an instance's time, and of contents of caches."""

from __future__ import annotations

import pytest

from epd_portable.placement.estimates import (
    CacheEstimate,
    CacheSizes,
    Recent,
    ResponseTimes,
    Work,
)
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


def test_the_latest_are_kept() -> None:
    recent: Recent[int] = Recent(3)
    recent.use([1, 2, 3])
    recent.use([1, 4])
    assert [n in recent for n in (1, 2, 3, 4)] == [True, False, True, True]
    recent.pop(4)
    assert len(recent) == 2
    recent.clear()
    assert len(recent) == 0


def test_the_beginning_of_a_prompt_is_kept_longest() -> None:
    cached = CacheEstimate(CacheSizes(blocks=4))
    cached.use_prefix((1, 2, 3))
    cached.use_prefix((11, 12, 13))
    assert (cached.prefix((1, 2, 3)), cached.prefix((11, 12, 13))) == (1, 3)
    cached.clear()
    assert cached.prefix((11,)) == 0


def test_first_blocks_of_a_long_prompt_are_retained() -> None:
    one = CacheEstimate(CacheSizes(blocks=5))
    one.use_prefix(tuple(range(8)))
    assert [one.prefix(each) for each in (tuple(range(8)), (9, 8), (0, 1), ())] == [5, 0, 2, 0]
