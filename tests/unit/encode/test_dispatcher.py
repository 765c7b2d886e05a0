from __future__ import annotations

import msgspec
import pytest

from epd_portable.encode.dispatcher import Dispatcher, EncodedItem
from epd_portable.wire.params import EncodeParams
from tests.unit.builders import SECRET, FakeRequest, encode_params, encoder_cache, request
from tests.unit.items.harness import spec

CONSUMER = "tcp://pd"


class Desk:
    def __init__(self) -> None:
        self.cache = encoder_cache(10)
        self.dispatcher = Dispatcher(self.cache, SECRET)

    def arrive(self, request_id: str, names: str, transfers: dict[str, str]) -> FakeRequest:
        """Add a request of one-letter items and transfers ``id -> mm_hash``."""
        items = [EncodedItem(name, "image", spec(1)) for name in names]
        params = encode_params(transfers, CONSUMER)
        self.dispatcher.request_arrived(request_id, items, params)
        return request(request_id, *((name, 1) for name in names))

    def take(self, *scheduled: str) -> list[tuple[str, str]]:
        return [(o.transfer_id, o.mm_hash) for o in self.dispatcher.take_orders(scheduled)]

    def kept(self) -> set[tuple[str, str]]:
        return {(consumer, item.mm_hash) for consumer, item in self.dispatcher.kept()}


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_an_item_is_ordered_when_it_gets_room_and_once(desk: Desk) -> None:
    r = desk.arrive("r", "ab", {"ta": "a", "tb": "b"})
    desk.cache.allocate(r, 0)
    assert desk.take() == [], "not scheduled in this step"
    assert desk.take("r", "other") == [("ta", "a")]
    desk.cache.allocate(r, 1)
    assert desk.take("r") == [("tb", "b")]
    assert desk.take("r") == []
    desk.dispatcher.reset()
    again = desk.arrive("again", "a", {"ta": "a"})
    assert desk.cache.check_and_update_cache(again, 0)
    assert desk.take("again") == [("ta", "a")], "what was under way is forgotten"


def test_item_space_is_held_until_its_transfers_end(desk: Desk) -> None:
    r = desk.arrive("r", "ab", {"ta": "a", "tb": "b"})
    dispatcher = desk.dispatcher
    assert (dispatcher.consumer("r"), dispatcher.consumer("another")) == (CONSUMER, "")
    for input_id in (0, 1):
        desk.cache.allocate(r, input_id)
    assert not dispatcher.kept()
    desk.take("r")
    dispatcher.request_finished("r")
    desk.cache.free(r)
    assert dispatcher.consumer("r") == ""
    assert desk.kept() == {(CONSUMER, "a"), (CONSUMER, "b")}
    assert desk.cache.num_freeable_slots == 8
    dispatcher.transfers_ended(["ta", "unknown"])
    assert desk.kept() == {(CONSUMER, "b")} and dispatcher.busy
    dispatcher.transfers_ended(["ta", "tb"])
    assert not dispatcher.kept() and not dispatcher.busy
    assert desk.cache.num_freeable_slots == 10


def test_item_is_kept_once_for_each_consumer_until_it_is_lost(desk: Desk) -> None:
    r = desk.arrive("r", "a", {"t1": "a", "t2": "a"})
    desk.cache.allocate(r, 0)
    desk.take("r")
    assert desk.kept() == {(CONSUMER, "a")}
    desk.dispatcher.transfers_ended(["t1"])
    assert desk.kept() == {(CONSUMER, "a")}
    desk.cache.reset()
    assert not desk.kept() and desk.dispatcher.busy


def test_a_transfer_without_an_item_is_left_out(desk: Desk) -> None:
    r = desk.arrive("r", "a", {"ta": "a", "tb": "b"})
    desk.cache.allocate(r, 0)
    assert desk.take("r") == [("ta", "a")]


def test_orders_of_a_request_that_ended_without_room_are_dropped(desk: Desk) -> None:
    r = desk.arrive("r", "a", {"ta": "a"})
    desk.dispatcher.request_finished("r")
    desk.cache.allocate(r, 0)
    assert desk.take("r") == []
    assert not desk.dispatcher.busy


def test_job_repeats_a_transfer_until_its_end_is_reported(desk: Desk) -> None:
    desk.cache.allocate(desk.arrive("r", "a", {"ta": "a"}), 0)
    assert not desk.dispatcher.repeats("r")
    desk.take("r")
    desk.arrive("again", "ab", {"tb": "b", "ta": "a"})
    assert desk.dispatcher.repeats("again") and not desk.dispatcher.repeats("r")
    desk.dispatcher.transfers_ended(["ta"])
    assert not desk.dispatcher.repeats("again")


@pytest.mark.parametrize(
    "changed",
    [{"proof": ""}, {"transfer_id": "other"}, {"item_uuid": "b"}, {"consumer": "tcp://mine"}],
    ids=lambda changed: next(iter(changed)),
)
def test_transfer_without_valid_proof_is_not_delivered(
    changed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """A request could name any address otherwise."""
    desk = Desk()
    (signed,) = encode_params({"t": "a"}, CONSUMER).transfers
    transfer = msgspec.structs.replace(signed, **changed)
    items = [EncodedItem(name, "image", spec(1)) for name in "ab"]
    desk.dispatcher.request_arrived("r", items, EncodeParams(transfers=(transfer,)))
    r = request("r", ("a", 1), ("b", 1))
    for index in range(2):
        desk.cache.allocate(r, index)
    assert desk.take("r") == []
    assert "has no valid proof" in caplog.text
