"""What the two preallocators do with an item that is announced before its request.

What both do for requests: `tests/contract/test_preallocator.py`.
"""

from __future__ import annotations

from tests.unit.scheduling.desk import Desk


def test_sync_lets_an_announced_item_wait_for_its_request_though_there_is_room() -> None:
    desk = Desk("sync")
    assert desk.accept("early", 1) is None
    assert "early" not in desk.cache.items
    assert desk.pool.free_bytes == desk.cache.num_free_slots == 10
    desk.claim("r", "early", 1)
    assert desk.reserve() == ["early"]
    desk.leave("r")
    desk.assert_everything_is_back()


def test_the_request_that_asks_takes_over_what_was_accepted() -> None:
    desk = Desk("async")
    desk.accept("early", 4)
    desk.claim("r", "early", 4)
    desk.reserve()
    assert desk.cache.num_free_slots == 6
    desk.deliver("early")
    assert desk.cache.holders("early") == {"r"}
    assert desk.ended == ["t-early", "t-r"]
    desk.leave("r")
    desk.assert_everything_is_back()
