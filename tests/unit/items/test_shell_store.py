"""The PD scheduler's side of items that the store brings, or does not."""

from __future__ import annotations

import pytest

from epd_portable.transfer.stores.loader import IDENTITY
from epd_portable.wire.messages import (
    Abort,
    Announce,
    AnyMessage,
    Grant,
    Injected,
    Nack,
    NackCode,
    Written,
)
from tests.unit.builders import peer
from tests.unit.items.harness import (
    CAT,
    LEASE_S,
    TIMEOUT_S,
    Item,
    Pair,
    assert_everything_is_back,
    sources,
    spec,
)

BARE = Item("cat", transfer_id="t-cat", has_media=False, sent_with_media=False)


class Store:
    """Messages of a loader to the receiver, and back."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.heard: list[AnyMessage] = []

    def announce(self, item: Item, attempt: int = 1) -> None:
        message = Announce(
            transfer_id=item.transfer_id,
            attempt=attempt,
            mm_hash=item.mm_hash,
            tensor=spec(item.num_tokens),
            producer=peer("store"),
        )
        self.say(message)

    def say(self, message: AnyMessage) -> None:
        self.pair.pd.mailbox.inbox.append((IDENTITY, message))
        self.pair.pd.step()
        outbox = self.pair.pd.mailbox.outbox
        self.heard += [message for identity, message in outbox if identity == IDENTITY]
        outbox[:] = [each for each in outbox if each[0] != IDENTITY]
        self.pair.to_encode()

    def nack(self, code: NackCode, attempt: int = 1) -> None:
        self.say(Nack(transfer_id="t-cat", attempt=attempt, code=code, detail="gone"))

    def granted(self) -> Grant:
        [grant] = [message for message in self.heard if isinstance(message, Grant)]
        return grant


@pytest.fixture
def store(pair: Pair) -> Store:
    return Store(pair)


def test_an_item_of_the_store_takes_a_slot_and_is_placed(pair: Pair, store: Store) -> None:
    pair.pd.mailbox.path = "store"
    pair.pd.arrive("r", CAT)
    store.announce(CAT)
    slot = store.granted().slot
    pair.pd.mailbox.inbox.append(
        (IDENTITY, Written(transfer_id="t-cat", attempt=1, generation=slot.generation))
    )
    [placement] = pair.pd.step()
    assert (placement.slot, placement.in_device_memory) == (slot, False)
    heard = [message for identity, message in pair.pd.mailbox.outbox if identity == IDENTITY]
    assert [type(message) for message in heard] == [Injected]
    assert sources(pair.pd, "r") == {"cat": "store"}
    assert_everything_is_back(pair.pd)


@pytest.mark.parametrize("item", [CAT, BARE], ids=["with media", "without"])
def test_item_missing_in_the_store_is_expected_from_an_encoder(
    pair: Pair, store: Store, item: Item
) -> None:
    pair.pd.arrive("r", item)
    store.announce(item)
    taken = store.granted().slot
    store.nack(NackCode.NOT_STORED)
    assert pair.pd.requested == ["t-cat"]
    assert not pair.pd.encode_here("r", 0), "the front may have it encoded"
    pair.encode.submit(item, ready=True)
    pair.round()
    [write] = pair.encode.writes.values()
    assert write.slot.offset != taken.offset, "a thread of the store may still write there"
    store.nack(NackCode.RELEASED)
    pair.settle()
    assert sources(pair.pd, "r") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


def test_missing_item_without_media_is_never_encoded(pair: Pair, store: Store) -> None:
    pair.pd.arrive("r", BARE)
    store.announce(BARE)
    store.nack(NackCode.NOT_STORED)
    store.nack(NackCode.RELEASED)
    assert pair.pd.requested == ["t-cat"]
    pair.pd.clock.now += TIMEOUT_S
    pair.pd.computed["r"] = 1
    pair.settle()
    assert not pair.pd.encode_here("r", 0)
    assert pair.pd.failed == {"r"}
    pair.pd.finish("r")
    assert_everything_is_back(pair.pd)


def test_item_is_encoded_when_its_load_fails_behind_a_request(pair: Pair, store: Store) -> None:
    pair.pd.arrive("r", CAT)
    pair.pd.arrive("s", Item("cat"))
    store.announce(CAT)
    pair.pd.computed["r"] = 3  # The prefix cache covers the item.
    pair.pd.step()
    store.nack(NackCode.NOT_STORED)
    assert pair.pd.requested == [], "no request needs this transfer"
    assert pair.pd.encode_here("s", 0)


def test_slot_of_a_late_load_is_free_after_its_loader(pair: Pair, store: Store) -> None:
    pair.pd.arrive("r", CAT)
    store.announce(CAT)
    pair.pd.finish("r")
    pair.pd.clock.now += LEASE_S
    store.say(Nack(transfer_id="other", code=NackCode.RELEASED, detail=""))
    assert any(isinstance(message, Abort) for message in store.heard)
    assert pair.pd.pool.free_bytes < pair.pd.pool.capacity_bytes
    store.nack(NackCode.RELEASED)
    pair.settle()
    assert_everything_is_back(pair.pd)


def test_late_or_repeated_loader_result_changes_nothing(pair: Pair, store: Store) -> None:
    pair.pd.arrive("r", CAT)
    store.announce(CAT)
    grant = store.granted()
    for _ in range(2):
        store.nack(NackCode.NOT_STORED)
        store.nack(NackCode.RELEASED)
    generation = grant.slot.generation
    store.say(Written(transfer_id="t-cat", attempt=1, generation=generation))
    assert not pair.pd.cache.items["cat"].is_here
    assert pair.pd.requested == ["t-cat"]
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    assert sources(pair.pd, "r") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)
