from __future__ import annotations

import pytest

from tests.unit.builders import request
from tests.unit.scheduling.desk import Desk


@pytest.fixture
def desk() -> Desk:
    return Desk("async")


def test_an_announced_item_gets_room_and_a_slot_before_anybody_asks(desk: Desk) -> None:
    claim = desk.accept("early", 4)
    assert claim is not None and claim.slot is not None
    assert claim.waiting == set()
    assert desk.cache.num_free_slots == 6
    assert desk.pool.free_bytes == 6
    assert desk.reserve() == []


def test_an_accepted_item_is_not_encoded_here_meanwhile(desk: Desk) -> None:
    desk.accept("early", 4)
    assert not desk.cache.can_allocate(request("r", ("early", 4)), 0, 100, 0)


def test_the_request_that_asks_takes_over_what_was_accepted(desk: Desk) -> None:
    desk.accept("early", 4)
    desk.claim("r", "early", 4)
    assert desk.reserve() == [], "it has its room already"
    assert desk.cache.num_free_slots == 6
    held = desk.deliver("early", "r")
    assert desk.cache.holders("early") == {"r"}
    desk.cache.free(held)
    desk.assert_everything_is_back()


def test_an_item_that_landed_for_nobody_is_idle_and_makes_way_for_the_first_request(
    desk: Desk,
) -> None:
    desk.accept("early", 8)
    desk.preallocator.finalize("early")
    assert desk.cache.num_freeable_slots == 10
    desk.claim("r", "a", 8)
    desk.reserve()
    assert "early" not in desk.cache
    desk.step()
    assert desk.reserve() == ["a"]


def test_requests_get_room_before_what_nobody_asked_for(desk: Desk) -> None:
    early = desk.accept("early", 8)
    assert early is not None and early.slot is not None
    lost = early.slot
    desk.preallocator.reopen("early")
    desk.claim("r", "a", 8)
    desk.pool.give_back(lost)
    assert desk.reserve() == ["a"]
    assert desk.preallocator.blocked is None, "nobody waits for the other one"


def test_what_a_request_takes_over_is_queued_at_the_request_s_place(desk: Desk) -> None:
    early = desk.accept("early", 8)
    assert early is not None and early.slot is not None
    lost = early.slot
    desk.preallocator.reopen("early")
    desk.claim("first", "a", 8)
    desk.claim("second", "early", 8)
    desk.pool.give_back(lost)
    assert desk.reserve() == ["a"]


def test_room_of_idle_entries_is_used_and_their_slots_a_step_later(desk: Desk) -> None:
    desk.accept("one", 8)
    desk.preallocator.finalize("one")
    assert desk.accept("two", 8) is None
    assert "one" not in desk.cache
    assert not desk.preallocator.knows("two"), "a refusal leaves nothing behind"
    assert not desk.cache._awaited
    desk.step()
    assert desk.accept("two", 8) is not None


def test_nothing_is_accepted_while_what_was_accepted_lost_its_slot(desk: Desk) -> None:
    desk.accept("early", 4)
    desk.preallocator.reopen("early")
    assert desk.accept("next", 1) is None


def test_giving_up_what_nobody_asked_for_frees_all_of_it(desk: Desk) -> None:
    claim = desk.accept("early", 4)
    assert claim is not None and claim.slot is not None
    assert desk.preallocator.withdraw("r", ["early"]) == [], "r never asked for it"
    assert desk.preallocator.cancel("early") is claim
    desk.pool.give_back(claim.slot)
    desk.assert_everything_is_back()
