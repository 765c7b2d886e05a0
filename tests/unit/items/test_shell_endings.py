"""The PD scheduler's side when things go wrong: every byte of the pool comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from epd_portable.errors import TransportError
from epd_portable.items.transfers import LEASE_MARGIN_S
from tests.unit.items.harness import (
    CAT,
    LEASE_S,
    TIMEOUT_S,
    TOKEN_BYTES,
    Item,
    Pair,
    PrefillSide,
    assert_everything_is_back,
    counted,
    sources,
)


def failures(pd: PrefillSide) -> dict[str, float]:
    name = "epd_pd_requests_failed_total{code="
    return {
        sample.removeprefix(name)[:-1]: count
        for sample, count in counted(pd.registry).items()
        if sample.startswith(name)
    }


def test_item_larger_than_pool_is_refused_and_leaves_no_trace(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert failures(pair.pd) == {"too_large": 1}
    (message,) = caplog.messages
    assert message.startswith("request r: an item of this request needs 9 encoder embeddings")
    assert f"at most 100 embeddings and {8 * TOKEN_BYTES} bytes" in message
    assert set(pair.pd.cache.items) == {"held"}, "nothing of it is delivered any more"
    assert set(pair.encode.ended) == {"t-held", "t-huge", "t-cat"}
    pair.pd.finish("r")
    assert "held" in pair.pd.cache
    assert pair.pd.cache.num_freeable_slots == 100, "nobody holds it"
    assert_everything_is_back(pair.pd)


@pytest.mark.parametrize(("lookahead", "refused"), [(0, False), (1, True)])
def test_items_that_a_drafter_reads_at_once_must_fit_at_once(
    lookahead: int, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(PrefillSide(cache_tokens=3, lookahead=lookahead))
    pair.pd.arrive("r", CAT, Item("dog"))  # one token of text between them
    pair.settle()
    assert pair.pd.failed == ({"r"} if refused else set())
    assert failures(pair.pd) == ({"too_large": 1} if refused else {})
    assert len(caplog.messages) == refused
    for message in caplog.messages:
        assert "2 items of this request are 4 encoder embeddings" in message
        assert "holds 3" in message
    pair.pd.finish("r")
    assert_everything_is_back(pair.pd)


@pytest.mark.parametrize("can_encode", [True, False])
def test_missing_item_is_encoded_locally_or_fails_requests(can_encode: bool) -> None:
    pair = Pair(PrefillSide(can_encode=can_encode))
    pair.pd.arrive("r", CAT)
    pair.pd.arrive("s", Item("cat", transfer_id="t-other"))
    pair.pd.clock.now += TIMEOUT_S
    pair.settle()
    assert pair.pd.failed == (set() if can_encode else {"r", "s"})
    assert pair.pd.prefill.may_schedule("r", 1) is can_encode
    assert failures(pair.pd) == ({} if can_encode else {"unavailable": 2})
    pair.pd.finish("r")
    pair.pd.finish("s")
    assert_everything_is_back(pair.pd)


def test_ended_request_is_not_failed_again() -> None:
    pd = PrefillSide(can_encode=False)
    pd.arrive("r", CAT)
    pd.clock.now += TIMEOUT_S
    pd.shell.take_in()
    assert not pd.prefill.may_schedule("r", 1)
    assert failures(pd) == {"unavailable": 1}
    pd.finish("r")
    assert pd.prefill.take_unavailable() == set()


def test_workers_get_a_revocation_before_its_slot_is_free() -> None:
    """Workers write the slot themselves on this path."""
    pair = Pair(PrefillSide(path="tcp"))
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.round()
    (write,) = pair.encode.writes.values()
    pair.pd.finish("r")
    pair.pd.shell.take_in()
    orders, pool = pair.pd.shell.orders, pair.pd.pool
    assert orders.take_orders([], computes=False).revoked == [write.slot.generation]
    assert pool.free_bytes < pool.capacity_bytes
    pair.pd.shell.step_done()
    assert pool.free_bytes == pool.capacity_bytes


@pytest.mark.parametrize("written", [True, False], ids=["has written", "works on"])
def test_message_during_a_step_beyond_the_lease_counts(pair: Pair, written: bool) -> None:
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=written)
    pair.round()
    pair.pd.shell.take_in()
    pair.pd.shell.orders.take_orders([], computes=True)
    pair.pd.clock.now += LEASE_S / 2
    if written:
        pair.encode.finish_write("t-cat")
    pair.to_pd()
    pair.pd.clock.now += LEASE_S / 2 + LEASE_MARGIN_S
    pair.pd.shell.step_done()
    if not written:
        pair.encode.session.output_ready("cat")
    assert [placement.mm_hash for placement in pair.settle()] == ["cat"]
    assert sources(pair.pd, "r") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_receiver_has_died_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the engine would serve on and encode every item itself, without a report."""
    pd = PrefillSide()
    broken = threading.Event()

    def wait(timeout_s: float) -> None:
        broken.set()
        raise OSError("no such thing as a socket")

    pd.mailbox.control = SimpleNamespace(wait=wait)
    pd.shell.listen()
    assert broken.wait(10)
    pd.shell.thread.join(10)
    with pytest.raises(TransportError, match="epd-items ended with OSError"):
        pd.shell.before_step()
    assert "no item comes here any more" in caplog.text


def test_close_wakes_and_ends_the_thread() -> None:
    pd, woken = PrefillSide(), threading.Event()
    pd.mailbox.control = SimpleNamespace(  # type: ignore[attr-defined]
        wait=lambda timeout_s: woken.wait(10), wake=woken.set
    )
    pd.shell.listen()
    pd.shell.close()
    assert not pd.shell.thread.is_alive()  # type: ignore[union-attr]


BARE = Item("cat", transfer_id="t-cat", has_media=False)
NOT_SENT = Item("cat", transfer_id="t-cat", sent_with_media=False)
KINDS: dict[str, tuple[Item, bool]] = {
    "the request has no media": (BARE, True),
    "the front sent none": (NOT_SENT, True),
    "the instance has no encoder": (Item("cat", transfer_id="t-cat"), False),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def case(request: pytest.FixtureRequest) -> tuple[Pair, Item]:
    item, can_encode = request.param
    return Pair(PrefillSide(can_encode=can_encode)), item


def deliver(pair: Pair, item: Item) -> None:
    pair.encode.submit(item, ready=True)
    pair.settle()


def _timed_out(pair: Pair, item: Item) -> None:
    pair.pd.clock.now += TIMEOUT_S


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
    _timed_out(pair, item)


def _evicted(pair: Pair, item: Item) -> None:
    """Evict an item that was computed, and must be again after a preemption."""
    deliver(pair, item)
    assert pair.pd.prefill.may_schedule("r", 3)
    pair.pd.cache.free_encoder_input(pair.pd.requests["r"], 0)
    pair.pd.arrive("s", Item("large", 8, "t-large"))  # takes the slots
    assert "cat" not in pair.pd.cache
    pair.pd.finish("s")
    pair.pd.cache.free(pair.pd.requests["r"])  # preempted
    assert not pair.pd.prefill.may_schedule("r", 1, running=False)
    pair.pd.shell.before_step()
    assert not pair.pd.prefill.may_schedule("r", 0, running=False)


def _emptied(pair: Pair, item: Item) -> None:
    deliver(pair, item)
    pair.pd.forget_everything()
    assert not pair.pd.prefill.may_schedule("r", 0)


@pytest.mark.parametrize("lose", [_timed_out, _given_up_by_everybody, _evicted, _emptied])
def test_once_lost_it_is_not_encoded_here_and_its_request_fails(
    case: tuple[Pair, Item], lose: Callable[[Pair, Item], None]
) -> None:
    pair, item = case
    pair.pd.arrive("r", item)
    lose(pair, item)
    pair.settle()
    assert failures(pair.pd) == {"unavailable": 1}
    assert pair.pd.failed == {"r"}
    assert not pair.pd.encode_here("r", 0)
    assert not pair.pd.prefill.may_schedule("r", 0)
    pair.pd.finish("r")
    assert_everything_is_back(pair.pd)


@pytest.mark.parametrize("lose", [_not_written, _late])
def test_item_cancelled_by_its_encoder_comes_from_another(
    lose: Callable[[Pair, Item], None],
) -> None:
    pair = Pair()
    pair.pd.arrive("r", BARE)
    lose(pair, BARE)
    pair.settle()
    assert pair.pd.requested == [BARE.transfer_id]
    deliver(pair, BARE)
    assert pair.pd.failed == set()
    assert sources(pair.pd, "r") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


def test_lost_it_is_not_missed_if_the_prefix_cache_covers_it(case: tuple[Pair, Item]) -> None:
    """A request fails when the engine would compute what is lost, and not before."""
    pair, item = case
    pair.pd.arrive("r", item)
    pair.pd.computed["r"] = 3
    _timed_out(pair, item)
    pair.pd.shell.take_in()
    assert pair.pd.prefill.may_schedule("r", 3, running=False)
    pair.settle()
    assert failures(pair.pd) == {}
    assert pair.pd.failed == set()
    assert sources(pair.pd, "r") == {"cat": "prefix_cache"}
    assert_everything_is_back(pair.pd)


def test_failed_request_is_logged_with_its_item_and_the_reason(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.pd.arrive("r", BARE)
    _timed_out(pair, BARE)
    pair.settle()
    message = caplog.messages[-1]
    assert message.startswith("request r: item cat: not delivered within 30.0 s")
    assert message.endswith(
        "it cannot be encoded here, where the request holds no media or the instance no encoder: "
        "send the request again"
    )
