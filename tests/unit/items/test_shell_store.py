"""The PD scheduler's side of items that the store brings, or does not."""

from __future__ import annotations

import pytest

from epd_portable.transfer.stores.loader import IDENTITY
from epd_portable.wire.messages import Announce, AnyMessage, Grant, Nack, NackCode, Written
from tests.unit.builders import peer
from tests.unit.items.harness import CAT, Item, Pair, assert_everything_is_back, sources, spec


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


def test_item_is_encoded_when_its_load_fails_behind_a_request(pair: Pair, store: Store) -> None:
    pair.pd.arrive("r", CAT)
    pair.pd.arrive("s", Item("cat"))
    store.announce(CAT)
    pair.pd.computed["r"] = 3  # The prefix cache covers the item.
    pair.pd.step()
    store.nack(NackCode.NOT_STORED)
    assert pair.pd.requested == [], "no request needs this transfer"
    assert pair.pd.encode_here("s", 0)


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
