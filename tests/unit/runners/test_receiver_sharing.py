"""Requests that share items, and a pool that is too small for all of them."""

from __future__ import annotations

import pytest

from epd_portable.wire.messages import Grant
from tests.unit.runners.harness import (
    CAT,
    DOG,
    TIMEOUT_S,
    Item,
    Pair,
    PrefillSide,
    assert_everything_is_back,
    sources,
)

# -- shared items --------------------------------------------------------------------------------


def test_a_refused_early_announcement_does_not_end_a_transfer_that_begins_after_it(
    pair: Pair,
) -> None:
    """Two tokens are expected, announced were three: that transfer fails."""
    pair.encode.submit(Item("cat", 3, "t-cat"))
    pair.round()
    pair.pd.arrive("r", CAT)
    other = Item("cat", transfer_id="t-other")
    pair.pd.arrive("s", other)
    pair.pd.finish("r")
    pair.encode.submit(other, ready=True)
    assert len(pair.settle()) == 1
    assert "t-other" in pair.encode.ended
    assert pair.pd.encode_here("s", 0)
    assert sources(pair.pd, "s") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


def test_a_request_does_not_wait_beyond_its_deadline_for_the_transfers_of_later_ones(
    pair: Pair,
) -> None:
    pair.pd.arrive("r", CAT)
    for number in range(2):
        pair.pd.clock.now += TIMEOUT_S / 3
        pair.pd.arrive(f"s{number}", Item("cat", transfer_id=f"t-{number}"))
        pair.settle()
    assert not pair.pd.encode_here("r", 0)
    pair.pd.clock.now += TIMEOUT_S / 3
    pair.settle()
    assert pair.pd.encode_here("r", 0)
    assert pair.pd.encode_here("s1", 0)


# -- a pool that is too small for all ------------------------------------------------------------


def test_slots_that_come_back_with_a_step_serve_the_next_in_that_step() -> None:
    pair = Pair(PrefillSide(pool_tokens=2))
    pair.pd.arrive("r", CAT)
    pair.pd.arrive("s", DOG)
    for item in (CAT, DOG):
        pair.encode.submit(item, ready=True)
    pair.settle()
    pair.pd.finish("r")
    receiver, cache = pair.pd.receiver, pair.pd.cache
    receiver.take_in()
    assert granted(pair) == []
    receiver.orders.take_orders(cache.get_freed_mm_hashes(), computes=True)
    receiver.step_done()
    assert granted(pair) == ["t-dog"], "without another message or step"


def granted(pair: Pair) -> list[str]:
    """Return the transfers that were granted since the last round."""
    return [
        message.transfer_id for _, message in pair.pd.mailbox.outbox if isinstance(message, Grant)
    ]


@pytest.mark.parametrize("can_encode", [True, False])
def test_the_deadline_of_a_request_ends_no_transfer_of_a_later_one(can_encode: bool) -> None:
    pair = Pair(PrefillSide(can_encode=can_encode))
    old = Item("cat", 2, "t-old", can_encode, can_encode)
    new = Item("cat", 2, "t-new", can_encode, can_encode)
    pair.pd.arrive("old", old)
    pair.round()
    pair.pd.clock.now += TIMEOUT_S - 1.0
    pair.pd.arrive("new", new)
    pair.encode.submit(new, ready=True)
    pair.round()
    pair.round()
    assert list(pair.encode.writes) == ["t-new"]
    pair.pd.clock.now += 1.0
    pair.round()
    assert pair.encode.ended == []
    placed = [placement.mm_hash for placement in pair.settle()]
    assert placed == ["cat"]
    assert pair.pd.failed == set()
    assert sources(pair.pd, "old") == sources(pair.pd, "new") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)
