"""Counters of a PD instance: every event once, also if messages arrive twice."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from epd_portable.wire.messages import Announce, Written
from tests.unit.items.harness import (
    CAT,
    DOG,
    LEASE_S,
    TIMEOUT_S,
    TOKEN_BYTES,
    Item,
    Pair,
    PrefillSide,
    counted,
)

ROOM = (
    "epd_pd_pool_bytes",
    "epd_pd_pool_used_bytes",
    "epd_pd_encoder_cache_embeddings",
    "epd_pd_encoder_cache_used_embeddings",
    "epd_pd_encoder_cache_held_embeddings",
)
RECEIVED = {
    "epd_pd_received_bytes_total{path=shm}": 2 * TOKEN_BYTES,
    "epd_pd_transfer_seconds_count{path=shm}": 1,
    "epd_pd_item_wait_seconds_count": 1,
}


def events(pd: PrefillSide) -> dict[str, float]:
    """Return what was counted, without the room."""
    return {name: value for name, value in counted(pd.registry).items() if name not in ROOM}


def room(pd: PrefillSide) -> list[float]:
    return [counted(pd.registry).get(name, 0) for name in ROOM]


def test_messages_that_arrive_twice_are_counted_once() -> None:
    pair = Pair()
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT)
    pair.encode.poll()
    (announce,) = pair.encode.outbox
    assert isinstance(announce, Announce)
    pair.round()
    pair.pd.mailbox.inbox += [(pair.encode.identity, announce)] * 2
    pair.round()
    pair.encode.session.output_ready("cat")
    pair.encode.poll()
    write = pair.encode.finish_write("t-cat")
    written = Written(transfer_id="t-cat", generation=write.slot.generation)
    pair.pd.mailbox.inbox += [(pair.encode.identity, written)] * 3
    pair.round()
    assert events(pair.pd) == RECEIVED


def _served(pair: Pair) -> None:
    pair.encode.session.output_ready("cat")
    pair.settle()
    pair.pd.finish("first")
    pair.pd.clock.now += 2.0
    pair.settle()


def _client_gone(pair: Pair) -> None:
    pair.pd.finish("second")


def _too_late(pair: Pair) -> None:
    pair.pd.clock.now += TIMEOUT_S


def _refused(pair: Pair) -> None:
    pair.pd.clock.now += 2.0
    pair.encode.poll()
    (asked,) = [m for m in pair.encode.outbox if m.transfer_id == "t-dog"]
    changed = msgspec.structs.replace(asked, mm_hash="wolf")
    pair.pd.mailbox.inbox += [(pair.encode.identity, changed)]
    pair.encode.outbox.clear()


@pytest.mark.parametrize("end", [_served, _client_gone, _too_late, _refused])
def test_announcement_without_space_is_counted_as_one_wait(end: Callable[[Pair], None]) -> None:
    pair = Pair(PrefillSide(pool_tokens=2))
    for request_id, item in (("first", CAT), ("second", DOG)):
        pair.pd.arrive(request_id, item)
        pair.encode.submit(item)
    pair.round()
    pair.pd.clock.now += 2.0
    pair.round()
    assert events(pair.pd)["epd_pd_transfers_waiting"] == 1, "it asked twice"
    assert events(pair.pd)["epd_pd_transfers_in_flight"] == 1
    end(pair)
    pair.round()
    assert "epd_pd_transfers_waiting" not in events(pair.pd)


def test_expired_lease_and_fallback_are_counted() -> None:
    pair = Pair()
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT)
    pair.round()
    pair.pd.clock.now += LEASE_S + 1.5
    pair.pd.step()
    lost = {"epd_pd_transfers_failed_total{cause=timeout}": 1}
    assert events(pair.pd) == lost
    assert pair.pd.encode_here("r", 0)
    assert pair.pd.encode_here("r", 0), "asked again in the next step"
    pair.pd.finish("r")
    local = {"epd_pd_items_total{source=local}": 1, "epd_pd_fallbacks_total": 1}
    assert events(pair.pd) == lost | local


def test_an_item_that_no_transfer_was_to_bring_is_no_fallback() -> None:
    pd = PrefillSide()
    pd.arrive("r", Item("cat"))
    assert pd.encode_here("r", 0)
    pd.finish("r")
    assert events(pd) == {"epd_pd_items_total{source=local}": 1}


def test_a_refused_announcement_is_counted_by_code() -> None:
    pair = Pair()
    pair.pd.arrive("r", CAT)
    pair.encode.submit(Item("cat", 3, "t-cat"))
    pair.encode.poll()
    pair.pd.mailbox.inbox += [(pair.encode.identity, m) for m in pair.encode.outbox]
    pair.round()
    assert events(pair.pd) == {"epd_pd_refusals_total{code=unexpected}": 1}, "announced twice"


def test_announcement_of_a_present_item_gets_not_needed() -> None:
    pair = Pair()
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    pair.pd.arrive("again", Item("cat", transfer_id="t-again"))
    pair.encode.submit(Item("cat", transfer_id="t-again"), ready=True)
    pair.settle()
    assert events(pair.pd)["epd_pd_not_needed_total"] == 1
    pair.pd.computed["again"] = 3
    pair.pd.finish("again")
    assert events(pair.pd)["epd_pd_items_total{source=encoder_cache}"] == 1


def test_each_wait_is_observed_and_the_item_counted_once() -> None:
    pair = Pair()
    pair.pd.arrive("first", CAT)
    pair.pd.clock.now += 1.0
    pair.pd.arrive("second", Item("cat", transfer_id="t-second"))
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    assert events(pair.pd) == RECEIVED | {"epd_pd_item_wait_seconds_count": 2}
    waited = pair.pd.registry.get_sample_value("epd_pd_item_wait_seconds_sum")
    assert waited == pytest.approx(1.0)


def test_room_is_that_after_the_last_step() -> None:
    pair = Pair(PrefillSide(pool_tokens=8, cache_tokens=100))
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT)
    pair.round()
    assert room(pair.pd) == [8 * TOKEN_BYTES, 2 * TOKEN_BYTES, 100, 2, 2]
    pair.encode.session.output_ready("cat")
    pair.settle()
    pair.pd.finish("r")
    pair.pd.shell.step_done()
    assert room(pair.pd) == [8 * TOKEN_BYTES, 2 * TOKEN_BYTES, 100, 2, 0]
    pair.pd.forget_everything()
    assert room(pair.pd) == [8 * TOKEN_BYTES, 0, 100, 0, 0]
    pair.pd.arrive("again", Item("cat", transfer_id="t-again"))
    pair.pd.step()
    assert room(pair.pd) == [8 * TOKEN_BYTES, 2 * TOKEN_BYTES, 100, 2, 2]
