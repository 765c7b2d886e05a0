"""The ring of hashes: one encoder for an item, by rules, by a scorer, and among named ones."""

from __future__ import annotations

from collections import Counter

import pytest

from epd_portable.config.choice import parse_choice
from epd_portable.placement.instances import EndpointPool, HashRing
from epd_portable.placement.profiles.policy import Policy
from tests.unit.builders import instance_settings
from tests.unit.placement.profiles.situations import seen, to_encode

BY_HASH = """
plugins: [{type: encode-filter}, {type: consistent-hash-scorer}]
schedulingProfiles:
- {name: encode, plugins: [{pluginRef: encode-filter}, {pluginRef: consistent-hash-scorer}]}
- {name: decode, plugins: []}
"""


def encoders_of(count: int) -> EndpointPool:
    pool = EndpointPool()
    for number in range(count):
        pool.add(instance_settings(f"e{number}")).health.seen_up()
    return pool


def test_rules_and_hash_scorer_choose_one_encoder_for_an_item() -> None:
    pool, policy = encoders_of(5), Policy(parse_choice(BY_HASH))
    for busy in ("", "e0", "e3"):
        if busy:
            instance = next(each for each in pool.all if each.name == busy)
            for _ in range(4):
                instance.in_flight().__enter__()
        went = set()
        for number in range(100):
            name = f"p{number}"
            found = {
                pool.choose_encoder(name),
                pool.choose_encoder(name, among=pool.all),
                policy.choose(to_encode(name), list(pool.all)),
            }
            assert len(found) == 1
            went |= found
        assert len(went) >= 3


def test_item_stays_at_its_encoder_when_some_are_named() -> None:
    pool = encoders_of(5)
    named = [each for each in pool.all if each.name in ("e1", "e2")]
    for number in range(100):
        own = pool.choose_encoder(f"p{number}")
        chosen = pool.choose_encoder(f"p{number}", among=named)
        assert chosen in named
        assert chosen is own or own not in named


def test_ring_reaches_each_member_when_all_others_are_excluded() -> None:
    ring = HashRing([seen(f"i{n}") for n in range(40)])
    assert {each.name for each in ring.in_order("key")} == {f"i{n}" for n in range(40)}
    for member in ring.members:
        assert ring.choose("key", [member]) is member


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (1, 1, 2), (0.5, 1, 1, 2, 4), (1,) * 12])
def test_shares_follow_weights(weights: tuple[float, ...]) -> None:
    ring = HashRing([seen(f"i{n}", weight=weight) for n, weight in enumerate(weights)])
    count = 1000 * len(weights)
    found = Counter(next(ring.in_order(f"key-{n}")).name for n in range(count))
    for number, weight in enumerate(weights):
        assert found[f"i{number}"] == pytest.approx(count * weight / sum(weights), rel=0.35)
