"""Items that cannot be encoded here never are: their requests end clearly instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epd_portable.wire.messages import EncodeFailed, Nack, NackCode
from tests.unit.runners.harness import (
    TIMEOUT_S,
    Item,
    Pair,
    PrefillSide,
    assert_everything_is_back,
    sources,
)

BARE = Item("cat", transfer_id="t-cat", has_media=False)
TOLD = Item("cat", transfer_id="t-cat", sent_with_media=False)
KINDS: dict[str, tuple[Item, bool]] = {
    "the request has no media": (BARE, True),
    "the router says so": (TOLD, True),
    "the instance has no encoder": (Item("cat", transfer_id="t-cat"), False),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def case(request: pytest.FixtureRequest) -> tuple[Pair, Item]:
    item, can_encode = request.param
    return Pair(PrefillSide(can_encode=can_encode)), item


def deliver(pair: Pair, item: Item) -> None:
    pair.encode.submit(item, ready=True)
    pair.settle()


def failures(pair: Pair) -> dict[str, NackCode]:
    pair.settle()
    return {m.transfer_id: m.code for m in pair.to_router if isinstance(m, Nack)}


def test_it_is_delivered_like_any_other(case: tuple[Pair, Item]) -> None:
    pair, item = case
    pair.pd.arrive("r", item)
    deliver(pair, item)
    assert pair.pd.receiver.may_schedule("r", 1)
    assert sources(pair.pd, "r") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


def _timed_out(pair: Pair, item: Item) -> None:
    pair.pd.clock.now += TIMEOUT_S


def _given_up_by_the_router(pair: Pair, item: Item) -> None:
    pair.pd.mailbox.inbox.append((b"router", EncodeFailed(transfer_id="t-cat", reason="dead")))


def _not_written(pair: Pair, item: Item) -> None:
    pair.encode.submit(item, ready=True)
    pair.round()
    pair.encode.finish_write("t-cat", "no such pool")


def _evicted(pair: Pair, item: Item) -> None:
    deliver(pair, item)
    pair.pd.cache.free(pair.pd.requests["r"])  # preempted
    assert pair.pd.cache.evict_idle({"cat"}) == "cat"
    pair.pd.step()
    assert not pair.pd.receiver.may_schedule("r", 0)


def _emptied(pair: Pair, item: Item) -> None:
    deliver(pair, item)
    pair.pd.forget_everything()
    assert not pair.pd.receiver.may_schedule("r", 0)


@pytest.mark.parametrize(
    "lose",
    [_timed_out, _given_up_by_the_router, _not_written, _evicted, _emptied],
)
def test_once_lost_it_is_not_encoded_here_and_its_request_fails(
    case: tuple[Pair, Item], lose: Callable[[Pair, Item], None]
) -> None:
    pair, item = case
    pair.pd.arrive("r", item)
    lose(pair, item)
    assert failures(pair) == {"t-cat": NackCode.UNAVAILABLE}
    assert pair.pd.failed == {"r"}
    assert not pair.pd.encode_here("r", 0)
    assert not pair.pd.receiver.may_schedule("r", 0)
    pair.pd.finish("r")
    assert_everything_is_back(pair.pd)


@pytest.mark.parametrize("can_encode", [True, False])
def test_without_a_transfer_it_fails_when_it_is_needed(can_encode: bool) -> None:
    pair = Pair(PrefillSide(can_encode=can_encode))
    pair.pd.arrive("r", Item("cat", has_media=not can_encode))
    assert not pair.pd.encode_here("r", 0)
    assert not pair.pd.receiver.may_schedule("r", 0)
    pair.pd.step()
    assert pair.pd.failed == {"r"}


def test_covered_by_the_prefix_cache_it_is_not_missed(case: tuple[Pair, Item]) -> None:
    pair, item = case
    pair.pd.arrive("r", item)
    assert pair.pd.receiver.may_schedule("r", 3)
    pair.pd.clock.now += TIMEOUT_S
    assert failures(pair) == {}
    assert sources(pair.pd, "r") == {"cat": "prefix_cache"}
    assert_everything_is_back(pair.pd)


def test_another_request_with_its_media_still_encodes_the_same_item_here() -> None:
    pair = Pair()
    pair.pd.arrive("r", BARE)
    pair.pd.arrive("s", Item("cat"))
    pair.pd.clock.now += TIMEOUT_S
    assert failures(pair) == {"t-cat": NackCode.UNAVAILABLE}
    assert pair.pd.failed == {"r"}
    assert pair.pd.encode_here("s", 0)
    assert pair.pd.receiver.may_schedule("s", 1)
