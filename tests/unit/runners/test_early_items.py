"""Items that are accepted before any request asks for them (``transfer.preallocation: async``)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epd_portable.connector.consumer import LEASE_MARGIN_S
from epd_portable.wire.messages import Announce, EncodeFailed, Nack, NackCode
from tests.unit.builders import peer
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
    spec,
)


def make_pair(**settings: object) -> Pair:
    return Pair(PrefillSide(preallocation="async", **settings))  # type: ignore[arg-type]


@pytest.fixture
def pair() -> Pair:
    return make_pair()


# -- the straight way ----------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [False, True])
def test_an_item_lands_before_its_request_and_is_there_when_that_comes(copies: bool) -> None:
    pair = make_pair(copies=copies)
    pair.encode.submit(CAT, ready=True)
    (placement,) = pair.settle()
    assert placement.mm_hash == "cat"
    assert pair.encode.ended == ["t-cat"]
    pair.pd.arrive("r", CAT)
    assert pair.pd.prefill.may_schedule("r", 1)
    outcome = pair.pd.finish("r")
    assert outcome is not None
    (item,) = outcome.items
    assert (item.source, item.encoder, item.path) == ("transfer", "encode-0", "shm")
    assert (item.nbytes, item.wait_ms) == (2 * TOKEN_BYTES, 0.0)
    assert_everything_is_back(pair.pd)


@pytest.mark.parametrize("landed", [False, True], ids=["lands meanwhile", "has landed"])
def test_an_item_that_its_request_holds_only_when_its_turn_comes_came_by_its_transfer(
    landed: bool,
) -> None:
    pair = make_pair(cache_tokens=6)
    pair.pd.arrive("keeps", Item("kept", 3))
    pair.encode.submit(CAT, ready=True)
    pair.round()
    if landed:
        pair.settle()
    pair.pd.arrive("first", Item("large", 4))
    pair.pd.clock.now += 1.0
    pair.pd.arrive("r", CAT)
    pair.pd.clock.now += 1.0
    pair.settle()
    assert "cat" in pair.pd.cache
    assert not pair.pd.prefill.may_schedule("r", 1), "the first waits"
    pair.pd.finish("keeps")
    pair.settle()
    assert pair.pd.prefill.may_schedule("r", 1)
    outcome = pair.pd.finish("r")
    assert outcome is not None
    (item,) = outcome.items
    assert (item.source, item.encoder, item.path) == ("transfer", "encode-0", "shm")
    assert item.wait_ms == (0.0 if landed else 1000.0)
    pair.pd.finish("first")
    assert_everything_is_back(pair.pd)


# -- what was accepted is not what the request means ---------------------------------------------


def test_an_encoder_of_another_kind_is_not_accepted_and_refused_when_the_request_comes(
    pair: Pair,
) -> None:
    strange = Announce(
        transfer_id="t-cat", mm_hash="cat", tensor=spec(2), producer=peer(fingerprint="other")
    )
    pair.pd.mailbox.inbox.append((b"strange", strange))
    pair.pd.step()
    assert pair.pd.pool.free_bytes == pair.pd.pool.capacity_bytes
    assert pair.pd.mailbox.outbox == [], "its request may find another encoder"
    pair.pd.arrive("r", CAT)
    pair.pd.step()
    assert NackCode.INCOMPATIBLE in nacks_to_router(pair)
    no_other_encoder(pair)
    assert_local(pair)


@pytest.mark.parametrize("landed", [False, True])
def test_a_request_whose_item_is_something_else_than_that_of_others_is_told(
    pair: Pair, landed: bool
) -> None:
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    if landed:
        pair.settle()
    pair.pd.arrive("s", Item("cat", 3, "t-other"))
    pair.settle()
    assert pair.pd.failed == {"s"}
    (nack,) = pair.to_router
    assert isinstance(nack, Nack)
    assert nack.code is NackCode.UNAVAILABLE
    assert "(3, 16)" in nack.detail and "(2, 16)" in nack.detail
    assert sources(pair.pd, "r") == {"cat": "transfer"}
    pair.pd.finish("s")
    assert_everything_is_back(pair.pd)


# -- transfers that end before their request -----------------------------------------------------


def _nobody_asks(pair: Pair) -> None:
    pair.encode.submit(CAT)
    pair.round()
    pair.pd.clock.now += TIMEOUT_S
    pair.settle()


def _write_failed(pair: Pair) -> None:
    pair.encode.submit(CAT, ready=True)
    pair.round()
    pair.encode.finish_write("t-cat", "no such pool")
    pair.settle()


def _producer_killed(pair: Pair) -> None:
    pair.encode.submit(CAT, ready=True)
    pair.round()
    pair.pd.mailbox.gone.add(pair.encode.session_id)
    pair.pd.clock.now += LEASE_S + LEASE_MARGIN_S
    pair.pd.step()


def _encoding_failed(pair: Pair) -> None:
    pair.encode.submit(CAT)
    pair.round()
    pair.pd.mailbox.inbox.append((b"router", EncodeFailed(transfer_id="t-cat", reason="")))
    pair.settle()


def _evicted(pair: Pair) -> None:
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    pair.pd.arrive("other", Item("large", 100))
    assert "cat" not in pair.pd.cache
    pair.pd.finish("other")
    pair.settle()


@pytest.mark.parametrize(
    "lose",
    [_nobody_asks, _write_failed, _producer_killed, _encoding_failed, _evicted],
    ids=lambda lose: lose.__name__.strip("_"),
)
def test_a_request_does_not_wait_for_an_item_that_was_lost_before_it_came(
    pair: Pair, lose: Callable[[Pair], None]
) -> None:
    lose(pair)
    assert pair.pd.pool.free_bytes == pair.pd.pool.capacity_bytes
    pair.pd.arrive("r", CAT)
    pair.pd.step()
    assert_local(pair)


# -- room ----------------------------------------------------------------------------------------


def test_an_item_that_does_not_fit_at_all_holds_up_no_other(pair: Pair) -> None:
    for item in (Item("whale", 9, "t-whale"), CAT):
        pair.encode.submit(item, ready=True)
    pair.settle()
    assert "cat" in pair.pd.cache


def nacks_to_router(pair: Pair) -> list[NackCode]:
    pair.to_encode()
    return [message.code for message in pair.to_router if isinstance(message, Nack)]


def no_other_encoder(pair: Pair) -> None:
    pair.pd.mailbox.inbox.append((b"router", EncodeFailed(transfer_id="t-cat", reason="none left")))
    pair.pd.step()


def assert_local(pair: Pair) -> None:
    """Check that ``r`` encodes its cat here, and that nothing is left afterwards."""
    assert pair.pd.prefill.may_schedule("r", 1)
    assert pair.pd.encode_here("r", 0)
    assert sources(pair.pd, "r") == {"cat": "local"}
    pair.pd.clock.now += TIMEOUT_S
    pair.settle()
    assert_everything_is_back(pair.pd)
