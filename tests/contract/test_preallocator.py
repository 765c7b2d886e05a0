"""What either preallocator does for requests: one suite over both."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.builders import request
from tests.unit.scheduling.desk import KINDS, Desk

MakeDesk = Callable[..., Desk]


@pytest.fixture(params=KINDS)
def make_desk(request: pytest.FixtureRequest) -> MakeDesk:
    """Return desks with the preallocator under test; arguments are those of `Desk`."""
    return lambda **sizes: Desk(request.param, **sizes)


@pytest.fixture
def desk(make_desk: MakeDesk) -> Desk:
    return make_desk()


def test_claims_are_reserved_in_order_until_the_first_that_does_not_fit(desk: Desk) -> None:
    for name, size in (("a", 6), ("b", 6), ("c", 1)):
        desk.claim(name, name, size)
    assert desk.reserve() == ["a"]
    assert desk.reserve() == [], "c would fit, but b was first"


@pytest.mark.parametrize(("cache_embeds", "pool_bytes"), [(6, 100), (100, 6)])
def test_whichever_is_short_cache_or_pool_stops_the_queue(
    make_desk: MakeDesk, cache_embeds: int, pool_bytes: int
) -> None:
    desk = make_desk(cache_embeds=cache_embeds, pool_bytes=pool_bytes)
    desk.claim("a", "a", 4)
    desk.claim("b", "b", 4)
    desk.claim("c", "c", 2)
    assert desk.reserve() == ["a"]
    desk.preallocator.withdraw("a", ["a"])
    assert desk.cache.num_free_slots == cache_embeds


def test_an_item_that_several_requests_await_is_reserved_once_at_the_first_place(
    desk: Desk,
) -> None:
    desk.claim("r", "shared", 6)
    desk.claim("r", "big", 6, 1)
    desk.claim("s", "shared", 6)
    assert desk.reserve() == ["shared"]
    claim = desk.preallocator.finalize("shared")
    assert claim.waiting == {("r", 0), ("s", 0)}
    desk.cache.free(request("r", ("shared", 6)))
    assert desk.cache.evict_idle({"shared"}) is None, "s holds it"


def test_two_requests_never_block_each_other_with_half_of_what_each_needs(desk: Desk) -> None:
    desk.claim("r", "r1", 5, 0)
    desk.claim("r", "r2", 5, 1)
    desk.claim("s", "s1", 5, 0)
    desk.claim("s", "s2", 5, 1)
    assert desk.reserve() == ["r1", "r2"]
    for name in ("r1", "r2"):
        desk.preallocator.finalize(name)
    desk.cache.free(request("r", ("r1", 5), ("r2", 5)))
    for _ in range(4):
        desk.reserve()
        desk.step()
    assert desk.preallocator.get("s1") is not None
    assert all(desk.preallocator.get(name).slot is not None for name in ("s1", "s2"))  # type: ignore[union-attr]


def test_an_idle_resident_is_evicted_when_slots_are_short_and_its_slot_is_used_a_step_later(
    make_desk: MakeDesk,
) -> None:
    desk = make_desk(cache_embeds=100, pool_bytes=10)
    desk.claim("r", "old", 8)
    desk.reserve()
    held = desk.deliver("old", "r")
    desk.claim("s", "new", 8)
    assert desk.reserve() == []
    desk.step()
    assert "old" in desk.cache, "held, so it stays"
    desk.cache.free(held)
    assert desk.reserve() == []
    assert "old" not in desk.cache
    assert desk.reserve() == [], "the workers have not forgotten it yet"
    desk.step()
    assert desk.reserve() == ["new"]


def test_no_more_is_evicted_while_slots_are_on_their_way_back(make_desk: MakeDesk) -> None:
    desk = make_desk(cache_embeds=100, pool_bytes=10)
    for name in ("one", "two"):
        desk.claim(name, name, 5)
        desk.reserve()
        desk.cache.free(desk.deliver(name, name))
    desk.claim("s", "new", 5)
    desk.reserve()
    slots = [desk.preallocator.retire(gone) for gone in desk.cache.get_freed_mm_hashes()]
    desk.reserve()
    assert "two" in desk.cache
    desk.preallocator.give_back(taken for taken in slots if taken is not None)
    assert desk.reserve() == ["new"]
    assert "two" in desk.cache


def test_entries_that_occupy_no_slot_are_not_evicted_for_slots(make_desk: MakeDesk) -> None:
    desk = make_desk(cache_embeds=100, pool_bytes=10)
    local = request("r", ("local", 5))
    assert desk.cache.can_allocate(local, 0, 100, 0)
    desk.cache.allocate(local, 0)
    desk.cache.free(local)
    desk.claim("s", "a", 8)
    desk.reserve()
    desk.claim("t", "b", 8)
    desk.reserve()
    assert "local" in desk.cache


def test_a_lost_slot_puts_the_claim_back_at_its_own_place(desk: Desk) -> None:
    desk.claim("r", "a", 5)
    desk.claim("s", "b", 5)
    desk.claim("t", "c", 5)
    assert desk.reserve() == ["a", "b"]
    lost = desk.preallocator.get("a")
    assert lost is not None and lost.slot is not None
    taken = lost.slot
    desk.preallocator.reopen("a")
    desk.preallocator.reopen("a")
    assert desk.cache.num_free_slots == 5
    assert desk.reserve() == [], "its slot is not back yet, and c must wait"
    desk.pool.give_back(taken)
    assert desk.reserve() == ["a"]


def test_withdrawing_returns_a_claim_only_when_its_last_request_leaves(desk: Desk) -> None:
    desk.claim("r", "a", 5, 0)
    desk.claim("r", "a", 5, 1)
    desk.claim("s", "a", 5, 0)
    desk.reserve()
    assert desk.preallocator.withdraw("r", ["a", "unknown"]) == []
    (orphan,) = desk.preallocator.withdraw("s", ["a"])
    assert orphan.slot is not None
    assert desk.preallocator.get("a") is None
    assert desk.cache.num_free_slots == 10
    assert desk.preallocator.withdraw("s", ["a"]) == []


def test_cancelling_ends_the_wait_and_allows_local_encoding(desk: Desk) -> None:
    desk.claim("r", "a", 5)
    desk.reserve()
    local = request("r", ("a", 5))
    assert not desk.cache.can_allocate(local, 0, 100, 0)
    assert desk.preallocator.cancel("a") is not None
    assert desk.preallocator.cancel("a") is None
    assert desk.cache.can_allocate(local, 0, 100, 0)


def test_what_could_never_fit_is_known_at_once(desk: Desk) -> None:
    assert desk.preallocator.fits_at_all(10, 10)
    assert not desk.preallocator.fits_at_all(11, 1)
    assert not desk.preallocator.fits_at_all(1, 11)


def test_an_item_that_was_not_reserved_cannot_be_finalized(desk: Desk) -> None:
    with pytest.raises(KeyError):
        desk.preallocator.finalize("a")
    desk.claim("r", "a", 5)
    with pytest.raises(KeyError):
        desk.preallocator.finalize("a")


def test_a_request_that_asks_again_for_its_own_item_waits_once(desk: Desk) -> None:
    desk.claim("r", "a", 5)
    desk.claim("r", "a", 5)
    desk.reserve()
    claim = desk.preallocator.get("a")
    assert claim is not None and claim.waiting == {("r", 0)}
    assert desk.cache.num_free_slots == 5


def test_withdrawing_from_an_item_that_one_never_asked_for_changes_nothing(desk: Desk) -> None:
    desk.claim("r", "a", 5)
    desk.reserve()
    assert desk.preallocator.withdraw("stranger", ["a"]) == []
    claim = desk.preallocator.get("a")
    assert claim is not None and claim.waiting == {("r", 0)}


def test_what_is_here_on_its_way_or_not_yet_forgotten_is_known(desk: Desk) -> None:
    assert not desk.preallocator.knows("a")
    desk.claim("r", "a", 5)
    assert desk.preallocator.knows("a")
    desk.reserve()
    desk.cache.free(desk.deliver("a", "r"))
    assert desk.preallocator.knows("a")
    assert desk.cache.evict_idle({"a"}) == "a"
    assert desk.preallocator.knows("a"), "workers may still read its slot"
    desk.step()
    assert not desk.preallocator.knows("a")


def test_an_item_whose_former_slot_is_still_read_gets_another_only_after_that(
    desk: Desk,
) -> None:
    desk.claim("r", "a", 4)
    desk.reserve()
    desk.cache.free(desk.deliver("a", "r"))
    desk.cache.evict_idle({"a"})
    desk.claim("s", "a", 4)
    assert desk.reserve() == []
    desk.step()
    assert desk.reserve() == ["a"]
    desk.cache.free(desk.deliver("a", "s"))
    desk.assert_everything_is_back()


def test_a_blocked_claim_is_the_first_request_s_without_room(desk: Desk) -> None:
    desk.claim("r", "a", 6)
    desk.claim("s", "b", 6)
    desk.claim("t", "c", 6)
    desk.reserve()
    blocked = desk.preallocator.blocked
    assert blocked is not None and blocked.mm_hash == "b"
    desk.withdraw("r", "a")
    assert desk.reserve() == ["b"]


def test_nothing_is_accepted_while_a_request_waits_for_room(desk: Desk) -> None:
    desk.claim("r", "a", 6)
    desk.claim("s", "b", 6)
    desk.reserve()
    assert desk.accept("early", 1) is None
    assert not desk.preallocator.knows("early")
    assert desk.cache.num_free_slots == 4


def test_what_could_never_fit_is_not_accepted(desk: Desk) -> None:
    assert desk.accept("huge", 11) is None
    assert not desk.preallocator.knows("huge")
