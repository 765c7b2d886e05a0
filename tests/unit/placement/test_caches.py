"""Estimates of what instances have in their caches."""

from __future__ import annotations

import random

from epd_portable.placement.estimates import CacheSizes, Recent


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
    cached = CacheSizes(blocks=4).new_estimate()
    cached.use_prefix((1, 2, 3))
    cached.use_prefix((11, 12, 13))
    assert (cached.prefix((1, 2, 3)), cached.prefix((11, 12, 13))) == (1, 3)
    cached.clear()
    assert cached.prefix((11,)) == 0


def test_whose_caches_have_a_beginning_is_known_without_a_look_at_all() -> None:
    chance = random.Random(11)
    caches = CacheSizes(blocks=12)
    everybody = [caches.new_estimate() for _ in range(5)]
    prompts = [tuple(10 * n + depth for depth in range(1 + n % 7)) for n in range(30)]
    hits = 0
    for _ in range(2000):
        one = chance.choice(everybody)
        if chance.random() < 0.02:
            one.clear()
        else:
            one.use_prefix(chance.choice(prompts))
        for blocks in prompts:
            having = {each for each in everybody if blocks[0] in each.blocks}
            assert set(caches.with_prefix(blocks)) == having
            hits += len(having)
    assert hits
    for each in everybody:
        each.clear()
    assert not any(caches.with_prefix(blocks) for blocks in prompts)


def test_how_much_of_a_prompt_is_known_is_found_from_any_guess() -> None:
    one = CacheSizes(blocks=5).new_estimate()
    one.use_prefix(tuple(range(8)))
    assert [one.prefix(tuple(range(8)), guess) for guess in range(9)] == [5] * 9
    assert [one.prefix((9, 8), guess) for guess in range(3)] == [0] * 3
    assert [one.prefix((0, 1), guess) for guess in range(3)] == [2] * 3
