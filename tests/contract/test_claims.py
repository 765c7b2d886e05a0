"""Space for claims of a prefill+decode engine: each rule by itself."""

from __future__ import annotations

import pytest

from epd_portable.items.table import State
from tests.unit.builders import request
from tests.unit.items.cache_desk import Desk, tensor


@pytest.fixture
def desk() -> Desk:
    return Desk()


def state(desk: Desk, mm_hash: str) -> State:
    return desk.cache.items[mm_hash].state


# -- the order of room ---------------------------------------------------------------------------


def test_claims_are_reserved_in_order_up_to_the_first_misfit(desk: Desk) -> None:
    for name, size in (("a", 6), ("b", 6), ("c", 1)):
        desk.claim(name, name, size)
    assert desk.reserve() == ["a"]
    assert desk.reserve() == [], "c would fit, but b was first"


def test_running_requests_items_are_granted_first(desk: Desk) -> None:
    desk.claim("seated", "held", 6)
    desk.reserve()
    desk.claim("first", "a", 6)
    desk.run("seated")
    desk.claim("seated", "b", 4, 1)
    desk.claim("seated", "c", 4, 2)
    assert desk.reserve() == ["b"]
    desk.deliver("held")
    desk.compute_past("seated", 0)
    desk.step()
    desk.reserve()
    desk.step()
    assert desk.reserve() == ["c"]


def test_request_starts_with_all_its_space_or_as_first_waiting(desk: Desk) -> None:
    desk.claim("r", "r1", 4, 0)
    desk.claim("s", "s1", 4, 0)
    desk.claim("s", "s2", 4, 1)
    desk.claim("t", "t1", 1)
    desk.reserve()
    assert [desk.may_start(who) for who in "rst"] == [True, False, False]
    desk.run("r")
    assert [desk.may_start(who) for who in "rst"] == [True, True, False]
    desk.run("r", False)
    assert not desk.may_start("s"), "r may wait for the seat that s would take"
    desk.leave("s")
    desk.reserve()
    assert desk.may_start("t")
    assert desk.may_start("without items")


def test_claim_order_follows_start_and_preemption_of_its_request(desk: Desk) -> None:
    desk.claim("r", "a", 6)
    desk.reserve()
    desk.claim("first", "b", 10)
    desk.claim("late", "c", 6)
    assert desk.reserve() == []
    desk.run("late")
    desk.leave("r")
    assert desk.reserve() == ["c"]
    desk.claim("late", "d", 6, 1)
    desk.run("late", False)
    assert desk.reserve() == ["b"], "whoever is not running gives way to who came before"


def test_running_request_takes_space_of_requests_not_started(desk: Desk) -> None:
    """Requests that have not started may wait for its seat."""
    for name in ("seated", "waits"):
        desk.claim(name, name, 4)
    desk.reserve()
    desk.claim("seated", "more", 4, 1)
    assert desk.reserve() == [], "nobody gives way to a request that can wait"
    desk.run("seated")
    assert desk.reserve() == ["more"]
    assert state(desk, "waits") is State.WAITING
    desk.leave("seated")
    assert desk.reserve() == ["waits"]


# -- items that several requests want ------------------------------------------------------------


def test_present_entry_is_not_held_while_an_earlier_claim_waits(desk: Desk) -> None:
    desk.claim("r", "here", 6)
    desk.reserve()
    desk.deliver("here")
    desk.leave("r")
    desk.claim_local("keeps", "kept", 4)
    desk.reserve()
    desk.claim_local("first", "large", 10)
    desk.claim("newcomer", "here", 6)
    desk.reserve()
    assert "here" in desk.cache
    assert desk.cache.holders("here") == frozenset()
    assert not desk.cache.check_and_update_cache(desk.request("newcomer"), 0)
    assert "t-newcomer" not in desk.ended, "it may be evicted before its turn"
    desk.leave("keeps")
    desk.reserve()
    assert desk.may_encode("first")
    assert "here" not in desk.cache


def test_present_entry_is_held_in_turn_without_its_transfer(desk: Desk) -> None:
    desk.claim("r", "here", 4)
    desk.reserve()
    desk.deliver("here")
    desk.claim("s", "other", 10)
    desk.claim("newcomer", "here", 4)
    desk.reserve()
    assert desk.cache.holders("here") == {"r"}
    desk.leave("s")
    assert desk.reserve() == [], "it needs no slot"
    assert desk.cache.holders("here") == {"r", "newcomer"}
    assert desk.cache.check_and_update_cache(desk.request("newcomer"), 0)
    assert "t-newcomer" in desk.ended


@pytest.mark.parametrize("advanced", [True, False], ids=["before its turn", "at once"])
def test_a_transfer_of_a_present_entry_ends_with_its_request(desk: Desk, advanced: bool) -> None:
    desk.claim("r", "here", 4)
    desk.reserve()
    desk.deliver("here")
    desk.claim("first", "other", 10)
    desk.claim("newcomer", "here", 4)
    if advanced:
        desk.reserve()
    desk.leave("newcomer")
    assert desk.ended == ["t-r", "t-newcomer"]
    for request_id in ("r", "first"):
        desk.leave(request_id)
    desk.assert_everything_is_back()


def test_unused_entry_of_another_description_is_replaced(desk: Desk) -> None:
    desk.claim("r", "a", 4)
    desk.reserve()
    desk.deliver("a")
    assert desk.cache.open("a", tensor(5)) is None, "r uses it"
    assert desk.cache.open("a", tensor(4)) is desk.cache.items["a"]
    desk.leave("r")
    item = desk.cache.open("a", tensor(5))
    assert item is not None and item.num_embeds == 5 and item.state is State.WAITING
    assert desk.cache.num_free_slots == 10


def test_item_awaited_under_another_description_is_refused(desk: Desk) -> None:
    desk.claim("r", "a", 4)
    assert desk.cache.open("a", tensor(5)) is None
    desk.leave("r")
    assert desk.cache.open("a", tensor(5)) is not None


# -- slots ---------------------------------------------------------------------------------------


def test_idle_items_slot_is_reused_a_step_after_its_eviction() -> None:
    desk = Desk(cache_embeds=100, pool_bytes=10)
    desk.claim("r", "old", 8)
    desk.reserve()
    desk.deliver("old")
    desk.claim("s", "new", 8)
    assert desk.reserve() == []
    desk.step()
    assert "old" in desk.cache, "held, so it stays"
    desk.leave("r")
    assert desk.reserve() == []
    assert "old" not in desk.cache
    assert desk.reserve() == [], "the workers have not forgotten it yet"
    desk.step()
    assert desk.reserve() == ["new"]


def test_no_more_is_evicted_while_slots_are_on_their_way_back() -> None:
    desk = Desk(cache_embeds=100, pool_bytes=10)
    for name in ("one", "two"):
        desk.claim(name, name, 5)
        desk.reserve()
        desk.deliver(name)
        desk.leave(name)
    desk.claim("s", "new", 5)
    desk.reserve()
    desk.claim("t", "small", 1)  # Something changes.
    desk.reserve()
    step = desk.begin_step()
    assert len(desk.pool.retiring) == 1
    desk.leave("t")
    desk.reserve()
    assert "two" in desk.cache
    desk.cache.step_ended(step)
    assert desk.reserve() == ["new"]
    assert "two" in desk.cache


def test_entries_that_occupy_no_slot_are_not_evicted_for_slots() -> None:
    desk = Desk(cache_embeds=100, pool_bytes=10)
    desk.claim_local("r", "local", 5)
    desk.reserve()
    desk.encode("r")
    desk.leave("r")
    desk.claim("s", "a", 8)
    desk.reserve()
    desk.claim("t", "b", 8)
    desk.reserve()
    assert "local" in desk.cache


def test_item_gets_a_new_slot_after_its_former_one_was_read(desk: Desk) -> None:
    desk.claim("r", "a", 4)
    desk.reserve()
    desk.deliver("a")
    desk.leave("r")
    desk.cache.reset()
    desk.claim("s", "a", 4)
    assert desk.reserve() == []
    desk.step()
    assert desk.reserve() == ["a"]
    desk.deliver("a")
    desk.leave("s")
    desk.assert_everything_is_back()


def test_an_item_that_was_not_granted_does_not_land(desk: Desk) -> None:
    item = desk.claim("r", "a", 5).item
    desk.reserve()
    with pytest.raises(AssertionError, match="RESERVED to RESIDENT"):
        desk.cache.land(item)


# -- leaving -------------------------------------------------------------------------------------


def test_a_request_that_claims_its_own_item_again_waits_once(desk: Desk) -> None:
    claim = desk.claim("r", "a", 5)
    assert desk.claim("r", "a", 5) is claim
    assert list(claim.inputs) == [0]
    assert desk.who("r").is_pending
    desk.reserve()
    assert desk.cache.num_free_slots == 5


def test_a_request_that_is_unknown_holds_nothing(desk: Desk) -> None:
    unknown = request("unknown", ("a", 5))
    desk.claim("r", "a", 5)
    desk.reserve()
    desk.deliver("a")
    desk.cache.free_encoder_input(unknown, 0)
    desk.cache.free(unknown)
    assert not desk.cache.check_and_update_cache(unknown, 0)
    assert not desk.cache.can_allocate(unknown, 0, 100, 0)
    assert desk.cache.get_cached_num_encoder_embeds(unknown, 0) == 5
    assert desk.cache.holders("a") == {"r"}


# -- encoding here -------------------------------------------------------------------------------


def test_an_item_without_transfers_is_encoded_here(desk: Desk) -> None:
    desk.claim("r", "a", 5)
    desk.reserve()
    assert not desk.may_encode("r"), "it is on its way"
    desk.lose_transfers("a")
    assert not desk.may_encode("r"), "it has no room now"
    assert desk.pool.free_bytes == 10
    assert desk.reserve() == []
    assert desk.may_encode("r")
    assert not desk.cache.can_allocate(desk.request("r"), 0, 4, 0), "beyond the step's budget"
    desk.encode("r")
    assert desk.cache.check_and_update_cache(desk.request("r"), 0)
    assert desk.cache.get_cached_input_ids(desk.request("r")) == {0}
    desk.leave("r")
    desk.assert_everything_is_back()


def test_transfer_is_dropped_while_its_item_is_encoded_locally(desk: Desk) -> None:
    desk.claim_local("r", "a", 6)
    desk.reserve()
    desk.claim("s", "a", 6)
    assert desk.reserve() == []
    desk.encode("r")
    assert desk.ended == ["t-s"]
    assert desk.cache.holders("a") == {"r", "s"}


@pytest.mark.parametrize("reserved", [False, True], ids=["not reserved", "reserved"])
def test_expired_request_encodes_an_item_that_others_await(desk: Desk, reserved: bool) -> None:
    desk.claim("r", "cat", 6)
    desk.reserve()
    desk.deliver("cat")
    assert not desk.cache.expire(desk.who("r"), "it was here at the deadline")
    if reserved:
        desk.compute_past("r")
    desk.cache.reset()
    desk.step()
    desk.claim("s", "cat", 6)
    if reserved:
        assert desk.reserve() == ["cat"]
        desk.preempt("r")
    assert desk.reserve() == []
    assert state(desk, "cat") is State.LOCAL
    desk.encode("r")
    assert desk.cache.check_and_update_cache(desk.request("s"), 0)


def test_item_without_encoder_is_lost_with_its_last_transfer(desk: Desk) -> None:
    desk.claim("r", "a", 5, metadata_only=True)
    desk.claim("s", "a", 5)
    desk.reserve()
    desk.lose_transfers("a", "nobody has it")
    assert desk.who("r").lost == {"a": "nobody has it"}
    assert not desk.who("r").claims
    assert desk.who("s").lost == {}
    desk.reserve()
    assert not desk.cache.can_allocate(request("r", ("a", 5)), 0, 100, 0)
    assert desk.may_encode("s")


def test_item_is_lost_when_the_only_request_with_media_leaves(desk: Desk) -> None:
    desk.claim_local("r", "a", 5)
    desk.claim_local("s", "a", 5, metadata_only=True)
    desk.reserve()
    assert desk.who("s").lost == {}
    assert not desk.may_encode("s")
    desk.leave("r")
    desk.reserve()
    assert set(desk.who("s").lost) == {"a"}
    assert "a" not in desk.cache.items
    assert desk.cache.num_free_slots == 10


# -- room that is lost ---------------------------------------------------------------------------


def test_a_preempted_request_keeps_its_room_until_it_is_finished(desk: Desk) -> None:
    desk.claim("r", "a", 6)
    desk.reserve()
    desk.deliver("a")
    desk.run("r")
    desk.cache.incomplete.discard("r")
    desk.cache.free(desk.request("r"))
    assert desk.cache.holders("a") == {"r"}
    assert not desk.who("r").running
    assert "r" in desk.cache.incomplete, "it computes its items again"
    desk.leave("r")
    desk.cache.free(desk.request("r"))
    assert desk.cache.num_freeable_slots == 10
    assert not desk.cache.incomplete


def test_a_reset_loses_what_cannot_be_encoded_here(desk: Desk) -> None:
    desk.claim("r", "a", 4, metadata_only=True)
    desk.reserve()
    desk.deliver("a")
    desk.cache.reset()
    desk.reserve()
    assert set(desk.who("r").lost) == {"a"}
    desk.step()
    assert desk.cache.num_free_slots == desk.pool.free_bytes == 10


def preempted(desk: Desk, size: int) -> None:
    """Let ``first`` compute an item, which is evicted then, and need it again.

    Meanwhile ``second`` has got its room, and waits for more.
    """
    desk.claim_local("first", "a", size)
    desk.reserve()
    desk.encode("first")
    desk.compute_past("first")
    desk.claim("second", "b", 6)
    desk.claim("second", "c", 6, 1)
    assert desk.reserve() == ["b"]
    assert "a" not in desk.cache
    desk.step()
    desk.preempt("first")
    desk.claim_local("first", "a", size)


def test_later_request_returns_space_to_an_earlier_one(desk: Desk) -> None:
    preempted(desk, 6)
    desk.reserve()
    assert desk.may_encode("first")
    assert state(desk, "b") is State.WAITING
    assert desk.pool.free_bytes == 10
    assert desk.ended == [], "it is still to come"
    desk.leave("first")
    assert desk.reserve() == ["b"]


@pytest.mark.parametrize("lands", [False, True], ids=["fails", "lands"])
def test_item_being_written_is_evicted_after_its_write(desk: Desk, lands: bool) -> None:
    preempted(desk, 6)
    desk.grant("b")
    assert desk.reserve() == []
    assert state(desk, "b") is State.GRANTED
    assert not desk.may_encode("first")
    if lands:
        desk.deliver("b")
    else:
        desk.lose_slot("b")
    desk.reserve()
    assert desk.may_encode("first")


def test_running_request_gives_no_space_to_a_waiting_one(desk: Desk) -> None:
    desk.run("second")
    preempted(desk, 6)
    desk.reserve()
    assert not desk.may_encode("first")
    assert state(desk, "b") is State.RESERVED
    desk.leave("second")
    desk.reserve()
    assert desk.may_encode("first")


def test_last_of_the_waiting_requests_gives_way_first(desk: Desk) -> None:
    for name in ("first", "second", "third"):
        desk.claim(name, name, 3)
    assert desk.reserve() == ["first", "second", "third"]
    for name in ("second", "third"):
        desk.claim(name, "large", 10, 1)
    desk.claim_local("first", "a", 4, 1)
    desk.reserve()
    assert desk.may_encode("first", 1)
    assert state(desk, "second") is State.RESERVED
    assert state(desk, "third") is State.WAITING


def test_request_with_all_its_items_gives_no_space(desk: Desk) -> None:
    desk.claim("first", "a", 6)
    desk.claim("second", "b", 4)
    desk.reserve()
    desk.claim("first", "c", 2, 1)
    assert desk.reserve() == []
    assert state(desk, "b") is State.RESERVED
    desk.leave("second")
    assert desk.reserve() == ["c"]


def test_item_takes_the_space_of_later_items_of_its_prompt(desk: Desk) -> None:
    desk.claim("r", "a", 4, 0)
    desk.claim("r", "b", 4, 1)
    desk.reserve()
    desk.grant("a")
    desk.lose_slot("a")
    assert desk.reserve() == ["a"], "in the slot of b, its own is still being written"
    assert state(desk, "b") is State.WAITING
    desk.release()
    desk.step()
    assert desk.reserve() == ["b"]
    desk.leave("r")
    desk.assert_everything_is_back()


def test_a_request_holds_no_item_behind_one_that_it_lost(desk: Desk) -> None:
    for place, mm_hash in enumerate("abc"):
        desk.claim("r", mm_hash, 2, place)
    assert desk.reserve() == ["a", "b", "c"]
    for mm_hash in "ab":
        desk.grant(mm_hash)
    desk.deliver("c")
    desk.lose_slot("a")
    held = {name for name, claim in desk.who("r").claims.items() if claim.is_served}
    assert held == set()
    assert state(desk, "b") is State.GRANTED, "it is being written"
    assert desk.cache.holders("c") == frozenset(), "it may be evicted"
    assert desk.reserve() == ["a"]
    held = {name for name, claim in desk.who("r").claims.items() if claim.is_served}
    assert held == set("abc")


def test_preempted_request_releases_items_behind_its_position(desk: Desk) -> None:
    for place, mm_hash in enumerate("ab"):
        desk.claim_local("r", mm_hash, 5, place)
    desk.reserve()
    desk.run("r")
    desk.encode("r", 0)
    desk.encode("r", 1)
    desk.compute_past("r", 0)
    desk.preempt("r")
    assert desk.cache.holders("b") == frozenset()
    desk.reserve()
    assert desk.cache.holders("a") == desk.cache.holders("b") == {"r"}, "both are still here"


# -- what could never be -------------------------------------------------------------------------


def test_item_larger_than_the_cache_is_refused_at_once(desk: Desk) -> None:
    assert desk.cache.fits_at_all(10, 10)
    assert not desk.cache.fits_at_all(11, 1)
    assert not desk.cache.fits_at_all(1, 11)
    assert desk.cache.fits_at_all(10), "encoded here, it needs no slot"


def test_item_without_media_is_retained_while_space_is_freed(desk: Desk) -> None:
    desk.claim("q", "e", 4)
    for input_id, name in enumerate(("a", "c", "a")):
        desk.claim("r", name, 4, input_id, metadata_only=True)
    assert desk.reserve() == ["e", "a"]
    desk.grant("e")
    desk.deliver("a")
    desk.run("q")
    desk.cache.moved(desk.who("r"), 1, running=True)  # It has computed the first of two.
    desk.claim("s", "a", 4, metadata_only=True)
    assert desk.reserve() == []
    assert "r" in desk.cache.holders("a"), "a transfer is left, and it is s's"
    desk.deliver("e")
    desk.leave("q")
    desk.reserve()
    desk.step()
    assert "c" in desk.given + desk.reserve()
    for request_id in "rs":
        desk.leave(request_id)
    desk.assert_everything_is_back()


def test_item_without_media_is_retained_before_others_compute(desk: Desk) -> None:
    desk.claim("q", "e", 4)
    for input_id, name in enumerate(("a", "c", "a")):
        desk.claim("r", name, 4, input_id, metadata_only=True)
    assert desk.reserve() == ["e", "a"]
    desk.deliver("e")
    desk.deliver("a")
    desk.cache.moved(desk.who("r"), 1, running=False)  # The prefix cache covers the first place.
    assert desk.reserve() == []
    assert "r" in desk.cache.holders("a"), "q has all that it needs"
    desk.run("q")
    desk.leave("q")
    desk.reserve()
    desk.step()
    assert "c" in desk.given + desk.reserve()
    desk.leave("r")
    desk.assert_everything_is_back()


def test_item_is_not_left_to_request_that_prefix_cache_covers(desk: Desk) -> None:
    """A request encodes its own needs only; one that cannot encode has its own transfer."""
    desk.claim_local("r", "a", 4)
    desk.reserve()
    assert desk.may_encode("r")
    desk.claim("s", "a", 4, metadata_only=True)
    desk.cache.moved(desk.who("r"), 1, running=False)
    assert desk.reserve() == [], "r may still encode it"
    assert desk.may_start("r")
    desk.run("r")
    assert desk.reserve() == ["a"]
    desk.deliver("a")
    assert desk.may_start("s")


def test_item_is_encoded_next_to_steps_after_failure_and_reset() -> None:
    desk = Desk(background=True)
    desk.claim("r", "a", 4, by_transfer=False)
    desk.reserve()
    assert state(desk, "a") is State.ENCODING
    desk.cache.reset()
    desk.cache.not_encoded("a")
    assert state(desk, "a") is State.LOCAL
    desk.leave("r")
    desk.claim("s", "a", 4, by_transfer=False)
    desk.reserve()
    assert state(desk, "a") is State.ENCODING
    desk.cache.encoded("a")
    assert state(desk, "a") is State.PRESENT
