"""Items that are accepted before any request asks for them (``transfer.preallocation: async``)."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

from epd_portable.connector.consumer import LEASE_MARGIN_S
from epd_portable.errors import NoCommonPathError
from epd_portable.wire.messages import Abort, Announce, EncodeFailed, Nack, NackCode
from tests.unit.builders import peer
from tests.unit.runners.harness import (
    CAT,
    DOG,
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


def test_an_item_that_is_being_written_when_its_request_comes_is_awaited(pair: Pair) -> None:
    pair.encode.submit(CAT, ready=True)
    pair.round()
    assert pair.encode.writes, "granted without a request"
    pair.pd.arrive("r", CAT)
    assert not pair.pd.prefill.may_schedule("r", 1)
    assert not pair.pd.encode_here("r", 0)
    pair.settle()
    assert pair.pd.prefill.may_schedule("r", 1)
    assert sources(pair.pd, "r") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


def test_a_request_that_takes_over_an_item_gives_it_its_own_deadline(pair: Pair) -> None:
    pair.encode.submit(CAT)
    pair.round()
    pair.pd.clock.now += TIMEOUT_S - 1
    pair.encode.submit(CAT)
    pair.round()
    pair.pd.arrive("r", CAT)
    pair.pd.clock.now += 2
    pair.pd.step()
    assert not pair.pd.encode_here("r", 0), "still awaited"


def test_another_request_finds_it_in_the_encoder_cache(pair: Pair) -> None:
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    pair.pd.arrive("r", Item("cat", transfer_id="t-other"))
    assert sources(pair.pd, "r") == {"cat": "encoder_cache"}


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


def test_synchronous_preallocation_grants_nothing_before_the_request() -> None:
    pair = Pair(PrefillSide(preallocation="sync"))
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    assert not pair.encode.writes
    assert pair.pd.pool.free_bytes == pair.pd.pool.capacity_bytes
    pair.pd.arrive("r", CAT)
    pair.settle()
    assert sources(pair.pd, "r") == {"cat": "transfer"}


def test_of_two_announcements_of_one_item_one_is_accepted_and_the_other_waits(pair: Pair) -> None:
    other = Item("cat", transfer_id="t-other")
    pair.encode.submit(CAT, ready=True)
    pair.encode.submit(other, ready=True)
    assert len(pair.settle()) == 1
    assert pair.encode.ended == ["t-cat"]
    pair.pd.arrive("r", CAT)
    pair.pd.arrive("s", other)
    pair.settle()
    assert pair.encode.ended == ["t-cat", "t-other"]
    assert sources(pair.pd, "s") == {"cat": "encoder_cache"}
    assert sources(pair.pd, "r") == {"cat": "transfer"}
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


def test_an_item_of_another_shape_that_has_landed_is_not_used(pair: Pair) -> None:
    pair.encode.submit(Item("cat", 3, "t-cat"), ready=True)
    pair.settle()
    pair.pd.arrive("r", CAT)
    assert "cat" not in pair.pd.cache
    pair.settle()
    assert_local(pair)


def test_an_item_of_another_shape_that_is_being_written_is_refused(pair: Pair) -> None:
    pair.encode.submit(Item("cat", 3, "t-cat"), ready=True)
    pair.round()
    assert pair.encode.writes
    pair.pd.arrive("r", CAT)
    pair.settle()
    assert "cat" not in pair.pd.cache
    assert_local(pair)


def test_an_item_of_the_right_shape_replaces_one_of_another_that_nobody_asked_for(
    pair: Pair,
) -> None:
    pair.encode.submit(Item("cat", 3, "t-stray"))
    pair.round()
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.encode.session.output_ready("cat")
    (placement,) = pair.settle()
    assert placement.tensor == spec(2)
    assert sources(pair.pd, "r") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


@pytest.mark.parametrize("landed", [False, True])
def test_an_item_that_the_encoder_names_otherwise_is_encoded_here(landed: bool) -> None:
    pair = make_pair()
    pair.encode.submit(Item("cat with a hat", 2, "t-cat"), ready=True)
    if landed:
        pair.settle()
    else:
        pair.round()
    pair.pd.arrive("r", CAT)
    pair.settle()
    if not landed:
        assert nacks_to_router(pair) == [NackCode.UNEXPECTED], "it may ask another encoder"
        no_other_encoder(pair)
    assert_local(pair)


def test_a_request_whose_item_is_something_else_than_what_others_use_is_told(pair: Pair) -> None:
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
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


def test_a_request_whose_item_is_something_else_than_what_others_await_is_told(
    pair: Pair,
) -> None:
    pair.pd.arrive("r", CAT)
    pair.pd.arrive("s", Item("cat", 3, "t-other"))
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    assert pair.pd.failed == {"s"}
    assert sources(pair.pd, "r") == {"cat": "transfer"}


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


def test_an_encoder_that_was_refused_early_is_reported_when_the_request_comes() -> None:
    pair = make_pair()
    session = pair.pd.receiver._session
    with mock.patch.object(session, "_choose", side_effect=NoCommonPathError("no path")):
        pair.encode.submit(CAT)
        pair.settle()
    pair.pd.arrive("r", CAT)
    pair.pd.step()
    assert nacks_to_router(pair) == [NackCode.NO_COMMON_PATH]
    no_other_encoder(pair)
    assert_local(pair)


def test_a_second_encoder_may_take_over_an_accepted_item(pair: Pair) -> None:
    pair.encode.submit(CAT)
    pair.round()
    second = Pair(pair.pd)
    second.encode.session_id = "encode-1-life-1"
    announce = Announce(
        transfer_id="t-cat", mm_hash="cat", tensor=spec(2), producer=peer("encode-1")
    )
    pair.pd.mailbox.inbox.append((b"encode-1", announce))
    pair.settle()
    pair.pd.arrive("r", CAT)
    pair.settle()
    pair.pd.mailbox.inbox.append((b"encode-1", Abort(transfer_id="t-cat", reason="")))
    pair.settle()
    assert_local(pair)


# -- room ----------------------------------------------------------------------------------------


def test_an_item_that_nobody_asks_for_makes_way_when_it_has_landed() -> None:
    pair = make_pair(pool_tokens=2)
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    pair.pd.arrive("r", DOG)
    pair.encode.submit(DOG, ready=True)
    pair.settle()
    assert "cat" not in pair.pd.cache
    assert sources(pair.pd, "r") == {"dog": "transfer"}
    assert_everything_is_back(pair.pd)


def test_nothing_is_accepted_while_a_request_waits_for_room() -> None:
    pair = make_pair(pool_tokens=3)
    pair.pd.arrive("r", CAT)
    pair.pd.arrive("s", DOG)
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    pair.encode.submit(Item("ant", 1, "t-ant"), ready=True)
    pair.settle()
    assert "ant" not in pair.pd.cache, "one token is free, but s needs two"
    pair.pd.finish("r")
    pair.encode.submit(DOG, ready=True)
    pair.settle()
    assert sources(pair.pd, "s") == {"dog": "transfer"}
    pair.settle()
    assert "ant" in pair.pd.cache
    assert_everything_is_back(pair.pd)


def test_nothing_is_accepted_while_an_item_to_encode_here_waits_for_room() -> None:
    pair = make_pair(cache_tokens=3)
    pair.pd.arrive("big", Item("held", 2))
    assert pair.pd.encode_here("big", 0)
    pair.pd.arrive("r", Item("local", 2))
    pair.pd.computed["r"] = 1
    pair.pd.step()
    pair.encode.submit(Item("ant", 1, "t-ant"), ready=True)
    pair.settle()
    assert "ant" not in pair.pd.cache
    pair.pd.finish("big")
    pair.pd.receiver.before_step()
    assert pair.pd.prefill.may_schedule("r", 1)
    assert pair.pd.encode_here("r", 0)
    pair.settle()
    assert "ant" in pair.pd.cache


def test_two_requests_whose_first_items_were_accepted_do_not_block_each_other() -> None:
    """Two slots: each is taken by the first item of a request that needs two."""
    pair = make_pair(pool_tokens=4)
    elk, emu = Item("elk", transfer_id="t-elk"), Item("emu", transfer_id="t-emu")
    for item in (CAT, DOG):
        pair.encode.submit(item, ready=True)
    pair.settle()
    pair.pd.arrive("r", CAT, elk)
    pair.pd.arrive("s", DOG, emu)
    for item in (elk, emu):
        pair.encode.submit(item, ready=True)
    pair.settle()
    assert pair.pd.prefill.may_schedule("r", 4), "s gave way"
    pair.pd.finish("r")
    pair.settle()
    assert pair.pd.encode_here("s", 0)
    assert pair.pd.prefill.may_schedule("s", 4)
    pair.pd.finish("s")
    assert_everything_is_back(pair.pd)


# -- a request that goes away --------------------------------------------------------------------


@pytest.mark.parametrize("copies", [False, True], ids=["views", "copies"])
@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize("rounds", range(5))
def test_everything_is_back_after_a_request_was_cancelled_whose_item_came_early(
    rounds: int, path: str, copies: bool
) -> None:
    pair = make_pair(path=path, copies=copies)
    pair.encode.submit(CAT, ready=True)
    for number in range(rounds):
        pair.round()
        if number == 2:
            pair.encode.finish_write("t-cat")
    pair.pd.arrive("r", CAT)
    pair.pd.finish("r")
    pair.settle()
    pair.pd.clock.now += TIMEOUT_S
    pair.settle()
    assert len(pair.encode.session) == 0
    assert_everything_is_back(pair.pd)


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
