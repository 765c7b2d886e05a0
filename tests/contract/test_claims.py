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


def test_expired_request_shares_the_slot_of_one_without_media(desk: Desk) -> None:
    desk.claim("first", "cat", 6, metadata_only=True)
    desk.claim("expired", "cat", 6)
    desk.claim("expired", "dog", 6, 1)
    assert desk.reserve() == ["cat"]
    desk.cache.expire(desk.who("expired"), "it is late")
    assert desk.reserve() == ["cat"]
    assert desk.cache.items["cat"].holders == {"first", "expired"}
    desk.lose_transfers("cat", "its encoder is gone")
    desk.reserve()
    assert desk.who("first").lost == {"cat": "its encoder is gone"}
    assert state(desk, "cat") is State.LOCAL
    assert desk.cache.items["cat"].holders == {"expired"}


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


def test_item_larger_than_the_cache_is_refused_at_once(desk: Desk) -> None:
    assert desk.cache.fits_at_all(10, 10)
    assert not desk.cache.fits_at_all(11, 1)
    assert not desk.cache.fits_at_all(1, 11)
    assert desk.cache.fits_at_all(10), "encoded here, it needs no slot"


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
