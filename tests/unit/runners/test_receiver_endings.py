"""The PD scheduler's side when things go wrong: every byte of the pool comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from epd_portable.connector.consumer import LEASE_MARGIN_S
from epd_portable.errors import TransportError
from epd_portable.wire.messages import EncodeFailed, Nack, NackCode
from tests.unit.runners.harness import (
    CAT,
    LEASE_S,
    TIMEOUT_S,
    TOKEN_BYTES,
    Item,
    Pair,
    PrefillSide,
    assert_everything_is_back,
    sources,
)

# -- failures ------------------------------------------------------------------------------------


def test_an_item_larger_than_the_pool_is_refused_and_leaves_no_trace(pair: Pair) -> None:
    held = Item("held", transfer_id="t-held")
    pair.pd.arrive("first", held)
    pair.encode.submit(held, ready=True)
    pair.settle()
    pair.pd.finish("first")
    huge = Item("huge", 9, "t-huge")
    pair.pd.arrive("r", Item("held", transfer_id="t-again"), CAT, huge)
    pair.encode.submit(CAT, ready=True)
    pair.encode.submit(huge, ready=True)
    pair.settle()
    assert pair.pd.failed == {"r"}
    assert not pair.pd.prefill.may_schedule("r", 0)
    (nack,) = pair.to_router
    assert isinstance(nack, Nack)
    assert nack.code is NackCode.TOO_LARGE
    assert "9 encoder embeddings" in nack.detail
    assert f"at most 100 embeddings and {8 * TOKEN_BYTES} bytes" in nack.detail
    assert set(pair.pd.cache.items) == {"held"}, "nothing of it is delivered any more"
    assert set(pair.encode.ended) == {"t-held", "t-huge", "t-cat"}
    pair.pd.finish("r")
    assert "held" in pair.pd.cache
    assert pair.pd.cache.num_freeable_slots == 100, "nobody holds it"
    assert_everything_is_back(pair.pd)


@pytest.mark.parametrize(("lookahead", "refused"), [(0, False), (1, True)])
def test_items_that_a_drafter_reads_at_once_must_fit_at_once(lookahead: int, refused: bool) -> None:
    pair = Pair(PrefillSide(cache_tokens=3, lookahead=lookahead))
    pair.pd.arrive("r", CAT, Item("dog"))  # one token of text between them
    pair.settle()
    assert pair.pd.failed == ({"r"} if refused else set())
    details = [m.detail for m in pair.to_router if isinstance(m, Nack)]
    assert len(details) == refused
    for detail in details:
        assert "2 items of this request are 4 encoder embeddings" in detail
        assert "holds 3" in detail
    pair.pd.finish("r")
    assert_everything_is_back(pair.pd)


@pytest.mark.parametrize("can_encode", [True, False])
def test_an_item_that_does_not_come_is_encoded_here_or_fails_its_requests(
    can_encode: bool,
) -> None:
    pair = Pair(PrefillSide(can_encode=can_encode))
    pair.pd.arrive("r", CAT)
    pair.pd.arrive("s", Item("cat", transfer_id="t-other"))
    pair.pd.clock.now += TIMEOUT_S
    pair.settle()
    assert pair.pd.failed == (set() if can_encode else {"r", "s"})
    assert pair.pd.prefill.may_schedule("r", 1) is can_encode
    nacks = {m.transfer_id: m.code for m in pair.to_router if isinstance(m, Nack)}
    expected = {"t-cat": NackCode.UNAVAILABLE, "t-other": NackCode.UNAVAILABLE}
    assert nacks == ({} if can_encode else expected)
    pair.pd.finish("r")
    pair.pd.finish("s")
    assert_everything_is_back(pair.pd)


def test_workers_hear_of_a_grant_that_was_taken_back_before_its_slot_is_free() -> None:
    """They write it themselves on this path."""
    pair = Pair(PrefillSide(path="tcp"))
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.round()
    (write,) = pair.encode.writes.values()
    pair.pd.finish("r")
    pair.pd.receiver.take_in()
    orders, pool = pair.pd.receiver.orders, pair.pd.pool
    assert orders.take_orders([], computes=False).revoked == [write.slot.generation]
    assert pool.free_bytes < pool.capacity_bytes
    pair.pd.receiver.step_done()
    assert pool.free_bytes == pool.capacity_bytes


@pytest.mark.parametrize("written", [True, False], ids=["has written", "works on"])
def test_what_an_encoder_says_during_a_step_that_outlasts_its_lease_counts(
    pair: Pair, written: bool
) -> None:
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=written)
    pair.round()
    pair.pd.receiver.take_in()
    pair.pd.receiver.orders.take_orders([], computes=True)
    pair.pd.clock.now += LEASE_S / 2
    if written:
        pair.encode.finish_write("t-cat")
    pair.to_pd()
    pair.pd.clock.now += LEASE_S / 2 + LEASE_MARGIN_S
    pair.pd.receiver.step_done()
    if not written:
        pair.encode.session.output_ready("cat")
    assert [placement.mm_hash for placement in pair.settle()] == ["cat"]
    assert sources(pair.pd, "r") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_receiver_has_died_ends(caplog: pytest.LogCaptureFixture) -> None:
    """It would answer on, encode everything itself, and nobody would know."""
    pd = PrefillSide()
    broken = threading.Event()

    def wait(timeout_s: float) -> None:
        broken.set()
        raise OSError("no such thing as a socket")

    pd.mailbox.control = SimpleNamespace(wait=wait)  # type: ignore[attr-defined]
    pd.receiver.listen()
    assert broken.wait(10)
    pd.receiver.thread.join(10)  # type: ignore[union-attr]
    with pytest.raises(TransportError, match="epd-receiver ended with OSError"):
        pd.receiver.before_step()
    assert "no item comes here any more" in caplog.text


# -- what cannot be encoded here -------------------------------------------------------------------

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


def _timed_out(pair: Pair, item: Item) -> None:
    pair.pd.clock.now += TIMEOUT_S


def _given_up_by_the_router(pair: Pair, item: Item) -> None:
    pair.pd.mailbox.inbox.append((b"router", EncodeFailed(transfer_id="t-cat", reason="dead")))


def _not_written(pair: Pair, item: Item) -> None:
    pair.encode.submit(item, ready=True)
    pair.round()
    pair.encode.finish_write("t-cat", "no such pool")
    pair.settle()


def _late(pair: Pair, item: Item) -> None:
    pair.encode.submit(item, ready=True)
    pair.round()
    pair.pd.clock.now += LEASE_S + LEASE_MARGIN_S
    pair.pd.step()
    pair.encode.finish_write("t-cat", "the slot is not leased any more")
    pair.settle()


def _given_up_by_everybody(pair: Pair, item: Item) -> None:
    _not_written(pair, item)
    _given_up_by_the_router(pair, item)


def _evicted(pair: Pair, item: Item) -> None:
    """It was computed, and must be again after a preemption."""
    deliver(pair, item)
    assert pair.pd.prefill.may_schedule("r", 3)
    pair.pd.cache.free_encoder_input(pair.pd.requests["r"], 0)
    pair.pd.arrive("s", Item("large", 8, "t-large"))  # takes the slots
    assert "cat" not in pair.pd.cache
    pair.pd.finish("s")
    pair.pd.cache.free(pair.pd.requests["r"])  # preempted
    assert not pair.pd.prefill.may_schedule("r", 1, running=False)
    pair.pd.receiver.before_step()
    assert not pair.pd.prefill.may_schedule("r", 0, running=False)


def _emptied(pair: Pair, item: Item) -> None:
    deliver(pair, item)
    pair.pd.forget_everything()
    assert not pair.pd.prefill.may_schedule("r", 0)


@pytest.mark.parametrize(
    "lose",
    [_timed_out, _given_up_by_the_router, _given_up_by_everybody, _evicted, _emptied],
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
    assert not pair.pd.prefill.may_schedule("r", 0)
    pair.pd.finish("r")
    assert_everything_is_back(pair.pd)


@pytest.mark.parametrize("reply_to", ["router", ""], ids=["router", "front"])
@pytest.mark.parametrize("lose", [_not_written, _late])
def test_what_its_encoder_gives_up_comes_from_another(
    lose: Callable[[Pair, Item], None], reply_to: str
) -> None:
    pair = Pair()
    pair.pd.arrive("r", BARE, reply_to=reply_to)
    lose(pair, BARE)
    pair.settle()
    told = [m.code for m in pair.to_router if isinstance(m, Nack) and m.attempt == 0]
    assert (told, pair.pd.requested) == (
        ([NackCode.MISSING], []) if reply_to else ([], [BARE.transfer_id])
    )
    deliver(pair, BARE)
    assert pair.pd.failed == set()
    assert sources(pair.pd, "r") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


def test_lost_it_is_not_missed_if_the_prefix_cache_covers_it(case: tuple[Pair, Item]) -> None:
    """A request fails when the engine would compute what is lost, and not before."""
    pair, item = case
    pair.pd.arrive("r", item)
    pair.pd.computed["r"] = 3
    _given_up_by_the_router(pair, item)
    pair.pd.receiver.take_in()
    assert pair.pd.prefill.may_schedule("r", 3, running=False)
    assert failures(pair) == {}
    assert pair.pd.failed == set()
    assert sources(pair.pd, "r") == {"cat": "prefix_cache"}
    assert_everything_is_back(pair.pd)


def test_a_failed_request_says_what_it_lost_why_and_what_to_do() -> None:
    pair = Pair()
    pair.pd.arrive("r", BARE)
    _given_up_by_the_router(pair, BARE)
    pair.settle()
    (nack,) = [m for m in pair.to_router if isinstance(m, Nack)]
    assert nack.detail.startswith("item cat: dead; it cannot be encoded here")
    assert nack.detail.endswith("send the request again")


def test_without_its_media_it_waits_for_who_encodes_it_here() -> None:
    pair = Pair()
    pair.pd.arrive("s", Item("cat"))
    pair.pd.arrive("r", Item("cat", has_media=False))
    assert not pair.pd.encode_here("r", 0)
    assert not pair.pd.prefill.may_schedule("r", 1)
    assert pair.pd.encode_here("s", 0)
    assert pair.pd.prefill.may_schedule("r", 1)
    assert sources(pair.pd, "s") == {"cat": "local"}
    pair.pd.computed["r"] = 3
    assert sources(pair.pd, "r") == {"cat": "encoder_cache"}
    assert_everything_is_back(pair.pd)
