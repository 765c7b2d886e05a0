"""Which encoder a picture has: one answer, whoever asks."""

from __future__ import annotations

from collections import Counter

import pytest

from epd_portable.config.choice import parse_choice
from epd_portable.placement.profiles.policy import Policy
from epd_portable.placement.ring import HashRing
from epd_portable.router.hops import HopSelection, RoutingHints
from epd_portable.router.selector import EndpointSelector
from tests.unit.placement.profiles.situations import seen
from tests.unit.router.test_selector import begun, fleet, picture

BY_HASH = """
plugins: [{type: encode-filter}, {type: consistent-hash-scorer}]
schedulingProfiles:
- {name: encode, plugins: [{pluginRef: encode-filter}, {pluginRef: consistent-hash-scorer}]}
- {name: decode, plugins: []}
"""


def test_direct_traffic_hops_and_a_hash_scorer_send_one_picture_to_one_encoder() -> None:
    instances = fleet(encoders=5)
    by_rule, by_policy = (
        EndpointSelector(instances),
        EndpointSelector(instances, Policy(parse_choice(BY_HASH))),
    )
    addresses = tuple(f"{each.name}:1" for each in instances.all)
    for busy in ("", "e0", "e3"):
        if busy:
            instance = instances.get(busy)
            assert instance is not None
            for _ in range(4):
                instance.working().__enter__()
        went = set()
        for number in range(100):
            item = picture(f"p{number}")
            hop = HopSelection(RoutingHints(encoders=addresses), begun(by_rule))
            found = {
                each.choose_encoder(item, ()) for each in (begun(by_rule), begun(by_policy), hop)
            }
            assert len(found) == 1
            went |= found
        assert len(went) >= 3


def test_a_hop_that_names_some_encoders_leaves_a_picture_at_its_own_if_that_is_among_them() -> None:
    instances = fleet(encoders=5)
    direct = EndpointSelector(instances)
    for number in range(100):
        item = picture(f"p{number}")
        hop = HopSelection(RoutingHints(encoders=("e1:1", "e2:1")), begun(direct))
        own, named = begun(direct).choose_encoder(item, ()), hop.choose_encoder(item, ())
        assert own is not None and named is not None
        assert named.name in ("e1", "e2")
        assert named is own or own.name not in ("e1", "e2")


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (1, 1, 2), (0.5, 1, 1, 2, 4), (1,) * 12])
def test_shares_follow_weights(weights: tuple[float, ...]) -> None:
    ring = HashRing([seen(f"i{n}", weight=weight) for n, weight in enumerate(weights)])
    count = 1000 * len(weights)
    found = Counter(next(ring.in_order(f"key-{n}")).name for n in range(count))
    for number, weight in enumerate(weights):
        assert found[f"i{number}"] == pytest.approx(count * weight / sum(weights), rel=0.35)


def test_every_member_is_in_order_of_every_key() -> None:
    members = [seen(f"i{n}") for n in range(40)]
    ring = HashRing(members)
    assert {each.name for each in ring.in_order("key")} == {each.name for each in members}
    assert list(HashRing[object]().in_order("key")) == []
    assert HashRing(members).choose("key", members) is None
