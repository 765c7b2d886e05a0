"""Estimates of what instances have in their caches."""

from __future__ import annotations

from epd_portable.placement.estimates import CacheEstimate, CacheSizes, Recent


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
