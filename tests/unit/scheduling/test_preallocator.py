"""What the two preallocators do with an item that is announced before its request.

What both do for requests: `tests/contract/test_preallocator.py`.
"""

from __future__ import annotations

import pytest

from epd_portable.scheduling.items import State
from tests.unit.scheduling.desk import Desk, tensor


@pytest.fixture
def desk() -> Desk:
    return Desk("async")


# -- sync ----------------------------------------------------------------------------------------


def test_sync_lets_an_announced_item_wait_for_its_request_though_there_is_room() -> None:
    desk = Desk("sync")
    assert desk.accept("early", 1) is None
    assert "early" not in desk.cache.items
    assert desk.pool.free_bytes == desk.cache.num_free_slots == 10
    desk.claim("r", "early", 1)
    assert desk.reserve() == ["early"]
    desk.leave("r")
    desk.assert_everything_is_back()


# -- async ---------------------------------------------------------------------------------------


def test_an_announced_item_gets_room_and_a_slot_before_anybody_asks(desk: Desk) -> None:
    item = desk.accept("early", 4)
    assert item is not None and item.slot is not None
    assert item.state is State.RESERVED
    assert not item.holders and not item.wanted
    assert desk.cache.num_free_slots == 6
    assert desk.pool.free_bytes == 6
    assert desk.reserve() == []
    assert desk.accept("early", 4) is None, "once"


def test_the_request_that_asks_takes_over_what_was_accepted(desk: Desk) -> None:
    desk.accept("early", 4)
    desk.claim("r", "early", 4)
    desk.reserve()
    assert desk.cache.num_free_slots == 6
    desk.deliver("early")
    assert desk.cache.holders("early") == {"r"}
    assert desk.ended == ["t-early", "t-r"]
    desk.leave("r")
    desk.assert_everything_is_back()


def test_an_item_that_landed_for_nobody_is_idle_and_makes_way_for_the_first_request(
    desk: Desk,
) -> None:
    desk.accept("early", 8)
    desk.deliver("early")
    assert desk.cache.num_freeable_slots == 10
    desk.claim("r", "a", 8)
    desk.reserve()
    assert "early" not in desk.cache
    desk.step()
    assert desk.reserve() == ["a"]


def test_an_accepted_item_that_loses_its_slot_waits_for_its_request(desk: Desk) -> None:
    desk.accept("early", 8)
    desk.grant("early")
    desk.lose_slot("early")
    desk.release()
    assert desk.cache.num_free_slots == desk.pool.free_bytes == 10
    assert desk.reserve() == []
    assert not desk.cache.is_blocked, "nobody waits for it"
    desk.claim("r", "a", 8)
    desk.claim("s", "early", 8)
    assert desk.reserve() == ["a"], "it has the place of the request that asks"
    desk.leave("r")
    assert desk.reserve() == ["early"]


def test_room_of_idle_entries_is_used_and_their_slots_a_step_later(desk: Desk) -> None:
    desk.accept("one", 8)
    desk.deliver("one")
    assert desk.accept("two", 8) is None
    assert "one" not in desk.cache
    assert "two" not in desk.cache.items, "a refusal leaves nothing behind"
    assert desk.cache.num_free_slots == 10
    desk.step()
    assert desk.accept("two", 8) is not None


@pytest.mark.parametrize("landed", [False, True])
def test_what_was_accepted_makes_way_for_another_item_of_its_name(desk: Desk, landed: bool) -> None:
    desk.accept("early", 4)
    if landed:
        desk.deliver("early")
    item = desk.cache.open("early", tensor(5))
    assert item is not None and item.state is State.WAITING
    assert desk.ended == ["t-early"]
    assert desk.cache.num_free_slots == 10
    assert desk.pool.free_bytes == (6 if landed else 10), "workers may still read it"


def test_a_bare_request_that_takes_over_an_item_loses_it_with_its_transfer(desk: Desk) -> None:
    desk.accept("early", 4)
    desk.claim_local("r", "early", 4, metadata_only=True)
    desk.reserve()
    desk.lose_transfers("early", "nobody asked in time")
    assert desk.who("r").lost == {"early": "nobody asked in time"}
    assert "early" not in desk.cache.items
