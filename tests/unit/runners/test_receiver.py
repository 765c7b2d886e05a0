"""The PD scheduler's side: from a request's arrival to the return of every byte of the pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epd_portable.connector.consumer import LEASE_MARGIN_S
from epd_portable.wire.messages import EncodeFailed, Nack, NackCode
from epd_portable.wire.params import ItemOutcome
from tests.unit.runners.harness import LEASE_S, TIMEOUT_S, TOKEN_BYTES, Item, Pair, PrefillSide

CAT = Item("cat", transfer_id="t-cat")
DOG = Item("dog", transfer_id="t-dog")


@pytest.fixture
def pair() -> Pair:
    return Pair()


def sources(pd: PrefillSide, request_id: str) -> dict[str, str]:
    """End a request; return how each of its items was had."""
    outcome = pd.finish(request_id)
    assert outcome is not None
    return {item.mm_hash: item.source for item in outcome.items}


def assert_everything_is_back(pd: PrefillSide) -> None:
    pd.forget_everything()
    assert pd.pool.free_bytes == pd.pool.capacity_bytes
    assert pd.cache.num_free_slots == pd.cache.num_freeable_slots == pd.cache.cache_size
    assert not pd.receiver._requests
    assert not pd.receiver._preallocator._claims
    assert not pd.receiver._preallocator._resident
    assert not pd.cache._awaited


# -- the straight way ----------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [False, True])
def test_an_item_is_delivered_placed_and_reported(copies: bool) -> None:
    pair = Pair(PrefillSide(copies=copies))
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    (placement,) = pair.settle()
    assert placement.mm_hash == "cat"
    assert placement.slot.nbytes == placement.tensor.nbytes == 2 * TOKEN_BYTES
    assert pair.encode.ended == ["t-cat"]
    outcome = pair.pd.finish("r")
    assert outcome is not None
    (item,) = outcome.items
    assert (item.source, item.encoder, item.path) == ("transfer", "encode-0", "shm")
    assert item.nbytes == 2 * TOKEN_BYTES
    assert_everything_is_back(pair.pd)


def test_an_item_that_is_copied_out_gives_its_slot_back_after_the_step() -> None:
    pair = Pair(PrefillSide(copies=True))
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    assert "cat" in pair.pd.cache
    assert pair.pd.pool.free_bytes == pair.pd.pool.capacity_bytes


def test_an_item_that_is_viewed_keeps_its_slot_while_it_is_in_the_cache(pair: Pair) -> None:
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    pair.pd.finish("r")
    assert pair.pd.pool.free_bytes == pair.pd.pool.capacity_bytes - 2 * TOKEN_BYTES
    pair.pd.forget_everything()
    assert pair.pd.pool.free_bytes == pair.pd.pool.capacity_bytes


def test_a_slot_is_not_given_back_before_the_step_that_forgets_its_item_has_ended(
    pair: Pair,
) -> None:
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    pair.pd.finish("r")
    pair.pd.cache.reset()
    receiver, pool = pair.pd.receiver, pair.pd.pool
    receiver.tick()
    receiver.take_placements([])
    receiver.take_placements(pair.pd.cache.get_freed_mm_hashes())
    receiver.step_done()
    assert pool.free_bytes < pool.capacity_bytes, "only the first of two steps has ended"
    receiver.step_done()
    assert pool.free_bytes == pool.capacity_bytes


def test_a_request_without_items_is_none_of_its_business(pair: Pair) -> None:
    assert pair.pd.receiver.may_schedule("unknown", 0)
    assert pair.pd.receiver.request_finished("unknown") is None


def test_an_item_in_the_cache_is_held_at_once_and_its_transfer_is_not_needed(pair: Pair) -> None:
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    pair.pd.finish("r")
    again = Item("cat", transfer_id="t-again")
    pair.pd.arrive("s", again)
    pair.encode.submit(again, ready=True)
    assert pair.settle() == []
    assert pair.encode.ended == ["t-cat", "t-again"]
    assert pair.pd.cache.evict_idle({"cat"}) is None, "a held item is not idle"
    assert sources(pair.pd, "s") == {"cat": "encoder_cache"}
    assert_everything_is_back(pair.pd)


# -- what may be computed ------------------------------------------------------------------------


def test_text_before_a_missing_item_may_be_computed_and_the_item_may_not(pair: Pair) -> None:
    pair.pd.arrive("r", CAT, DOG)  # token 0 text, 1-2 cat, 3 text, 4-5 dog
    may = pair.pd.receiver.may_schedule
    assert [may("r", computed) for computed in (0, 1)] == [True, False]
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    assert [may("r", computed) for computed in (0, 1, 3, 4)] == [True, True, True, False]


def test_an_item_to_encode_here_may_be_computed_when_there_is_room() -> None:
    pd = PrefillSide(cache_tokens=3)
    pd.arrive("big", Item("held", 3))
    assert pd.encode_here("big", 0)
    pd.arrive("r", Item("local", 2))
    assert not pd.receiver.may_schedule("r", 1)
    pd.finish("big")
    assert pd.receiver.may_schedule("r", 1)


def test_an_awaited_item_is_not_encoded_here_until_its_transfer_failed(pair: Pair) -> None:
    pair.pd.arrive("r", CAT)
    assert not pair.pd.encode_here("r", 0)
    pair.pd.mailbox.inbox.append((b"router", EncodeFailed(transfer_id="t-cat", reason="")))
    pair.round()
    assert pair.pd.receiver.may_schedule("r", 1)
    assert pair.pd.encode_here("r", 0)
    assert sources(pair.pd, "r") == {"cat": "local"}
    assert_everything_is_back(pair.pd)


def test_an_item_that_the_prefix_cache_covers_is_given_up(pair: Pair) -> None:
    pair.pd.arrive("r", CAT, DOG)
    pair.encode.submit(CAT)
    pair.encode.submit(DOG, ready=True)
    pair.round()
    assert pair.pd.receiver.may_schedule("r", 3)
    pair.settle()
    assert set(pair.encode.ended) == {"t-cat", "t-dog"}
    assert sources(pair.pd, "r") == {"cat": "prefix_cache", "dog": "transfer"}
    assert_everything_is_back(pair.pd)


def test_an_item_that_comes_twice_in_a_prompt_is_needed_until_its_last_place(pair: Pair) -> None:
    pair.pd.arrive("r", CAT, CAT)
    assert not pair.pd.receiver.may_schedule("r", 4), "past the first place, before the second"
    pair.encode.submit(CAT, ready=True)
    assert len(pair.settle()) == 1
    engine_request = pair.pd.requests["r"]
    pair.pd.cache.free_encoder_input(engine_request, 0)
    assert pair.pd.cache.evict_idle({"cat"}) is None
    pair.pd.cache.free_encoder_input(engine_request, 1)
    assert pair.pd.cache.evict_idle({"cat"}) == "cat"
    pair.pd.finish("r")
    assert_everything_is_back(pair.pd)


# -- shared items --------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", ["r", "s"])
def test_a_claim_outlives_one_of_two_requests_that_wait_for_it(pair: Pair, gone: str) -> None:
    pair.pd.arrive("r", CAT)
    pair.pd.arrive("s", Item("cat", transfer_id="t-other"))
    pair.encode.submit(CAT)
    pair.round()
    pair.pd.finish(gone)
    pair.encode.session.output_ready("cat")
    (placement,) = pair.settle()
    assert placement.mm_hash == "cat"
    (left,) = pair.pd.requests
    assert sources(pair.pd, left) == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


def test_a_request_without_a_transfer_waits_for_the_one_of_another(pair: Pair) -> None:
    pair.pd.arrive("r", CAT)
    pair.pd.arrive("s", Item("cat"))
    assert not pair.pd.receiver.may_schedule("s", 1)
    pair.pd.finish("r")
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    assert pair.pd.receiver.may_schedule("s", 1)
    assert sources(pair.pd, "s") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


def test_one_transfer_may_fail_while_another_brings_the_item(pair: Pair) -> None:
    other = Item("cat", transfer_id="t-other")
    pair.pd.arrive("r", CAT)
    pair.pd.arrive("s", other)
    pair.encode.submit(CAT)
    pair.round()
    pair.pd.mailbox.inbox.append((b"router", EncodeFailed(transfer_id="t-cat", reason="")))
    pair.encode.submit(other, ready=True)
    pair.settle()
    assert sources(pair.pd, "r") == sources(pair.pd, "s") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


def test_a_refused_early_announcement_does_not_end_a_transfer_that_begins_after_it(
    pair: Pair,
) -> None:
    pair.encode.submit(Item("cat", 3, "t-cat"))
    pair.round()
    pair.pd.arrive("r", CAT)  # two tokens, announced were three: fails with the next step
    other = Item("cat", transfer_id="t-other")
    pair.pd.arrive("s", other)
    pair.encode.submit(other, ready=True)
    assert len(pair.settle()) == 1
    assert sources(pair.pd, "s") == {"cat": "transfer"}


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
    assert not pair.pd.receiver.may_schedule("r", 0)
    (nack,) = pair.to_router
    assert isinstance(nack, Nack)
    assert nack.code is NackCode.TOO_LARGE
    assert "9 encoder embeddings" in nack.detail
    assert f"at most 100 embeddings and {8 * TOKEN_BYTES} bytes" in nack.detail
    assert not pair.pd.receiver._preallocator._claims, "nothing of it is delivered any more"
    assert set(pair.encode.ended) == {"t-held", "t-huge", "t-cat"}
    pair.pd.finish("r")
    assert pair.pd.cache.evict_idle({"held"}) == "held", "nobody holds it"
    assert_everything_is_back(pair.pd)


def test_a_refused_request_does_not_take_an_item_from_another_that_waits_for_it(
    pair: Pair,
) -> None:
    pair.pd.arrive("good", Item("cat", transfer_id="t-good"))
    pair.pd.arrive("bad", CAT, Item("huge", 9, "t-huge"))
    pair.pd.step()
    pair.pd.finish("bad")
    pair.encode.submit(Item("cat", transfer_id="t-good"), ready=True)
    pair.settle()
    assert sources(pair.pd, "good") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


def test_an_item_of_just_the_pool_s_size_is_delivered(pair: Pair) -> None:
    whole = Item("whole", 8, "t-whole")
    pair.pd.arrive("r", whole)
    pair.encode.submit(whole, ready=True)
    assert len(pair.settle()) == 1


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
    assert pair.pd.receiver.may_schedule("r", 1) is can_encode
    nacks = {m.transfer_id: m.code for m in pair.to_router if isinstance(m, Nack)}
    expected = {"t-cat": NackCode.UNAVAILABLE, "t-other": NackCode.UNAVAILABLE}
    assert nacks == ({} if can_encode else expected)
    pair.pd.finish("r")
    pair.pd.finish("s")
    assert_everything_is_back(pair.pd)


def test_a_failed_write_falls_to_local_encoding_and_its_slot_comes_back(pair: Pair) -> None:
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.round()
    pair.encode.finish_write("t-cat", "no such pool")
    pair.settle()
    assert pair.pd.pool.free_bytes == pair.pd.pool.capacity_bytes
    assert pair.pd.encode_here("r", 0)


def test_a_producer_killed_during_its_write_gives_its_slot_back_when_it_is_gone(
    pair: Pair,
) -> None:
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.round()
    assert pair.encode.writes
    pair.pd.clock.now += LEASE_S + LEASE_MARGIN_S
    pair.pd.step()
    assert pair.pd.pool.free_bytes < pair.pd.pool.capacity_bytes, "it may still write"
    pair.pd.mailbox.gone.add(pair.encode.session_id)
    pair.pd.step()
    assert pair.pd.pool.free_bytes == pair.pd.pool.capacity_bytes
    assert pair.pd.encode_here("r", 0)


# -- a pool that is too small for all ------------------------------------------------------------


def test_items_are_delivered_in_the_order_of_arrival_when_the_pool_is_short() -> None:
    pair = Pair(PrefillSide(pool_tokens=2))
    names = [f"item-{number}" for number in range(8)]
    items = [Item(name, 2, f"t-{name}") for name in names]
    for name, item in zip(names, items, strict=True):
        pair.pd.arrive(name, item)
    for item in reversed(items):
        pair.encode.submit(item, ready=True)
    order = []
    for _ in range(len(items)):
        for placement in pair.settle():
            order.append(placement.mm_hash)
            pair.pd.finish(placement.mm_hash)
    assert order == names
    assert_everything_is_back(pair.pd)


def test_idle_items_make_way_for_awaited_ones_when_slots_are_short() -> None:
    pair = Pair(PrefillSide(pool_tokens=4))
    for name in ("one", "two"):
        item = Item(name, 2, f"t-{name}")
        pair.pd.arrive(name, item)
        pair.encode.submit(item, ready=True)
        pair.settle()
        pair.pd.finish(name)
    whole = Item("whole", 4, "t-whole")
    pair.pd.arrive("r", whole)
    pair.encode.submit(whole, ready=True)
    placed = [placement.mm_hash for _ in range(3) for placement in pair.settle()]
    assert placed == ["whole"]
    assert "one" not in pair.pd.cache
    assert "two" not in pair.pd.cache


def test_requests_that_hold_what_the_other_waits_for_end_their_wait_at_the_deadline() -> None:
    """One slot; r has used cat and waits for dog, s holds cat and waits for emu behind dog."""
    pair = Pair(PrefillSide(pool_tokens=2))
    emu, other_cat = Item("emu", transfer_id="t-emu"), Item("cat", transfer_id="t-other")
    pair.pd.arrive("r", CAT, DOG)
    pair.pd.arrive("s", emu, other_cat)
    for item in (CAT, DOG, emu, other_cat):
        pair.encode.submit(item, ready=True)
    pair.settle()
    pair.pd.cache.free_encoder_input(pair.pd.requests["r"], 0)
    pair.settle()
    assert not pair.pd.receiver.may_schedule("r", 4)
    pair.pd.clock.now += TIMEOUT_S
    pair.settle()
    assert pair.pd.encode_here("r", 1)
    assert pair.pd.encode_here("s", 0)
    assert sources(pair.pd, "r") == {"cat": "transfer", "dog": "local"}
    assert sources(pair.pd, "s") == {"emu": "local", "cat": "transfer"}
    assert_everything_is_back(pair.pd)


# -- placements ----------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [False, True])
def test_an_item_evicted_before_its_placement_is_not_placed(copies: bool) -> None:
    pair = Pair(PrefillSide(cache_tokens=2, copies=copies))
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.round()
    pair.encode.finish_write("t-cat")
    pair.to_pd()
    pair.pd.receiver.tick()  # has landed
    pair.pd.finish("r")
    pair.pd.arrive("s", Item("local", 2))
    assert pair.pd.encode_here("s", 0), "takes the room of the idle cat"
    assert pair.pd.receiver.take_placements(pair.pd.cache.get_freed_mm_hashes()) == []
    pair.pd.receiver.step_done()
    assert pair.pd.pool.free_bytes == pair.pd.pool.capacity_bytes
    pair.pd.finish("s")
    assert_everything_is_back(pair.pd)


@pytest.mark.parametrize("copies", [False, True])
def test_a_reset_of_the_encoder_cache_gives_every_resident_slot_back(copies: bool) -> None:
    pair = Pair(PrefillSide(copies=copies))
    pair.pd.arrive("r", CAT, DOG)
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    pair.encode.submit(DOG, ready=True)
    pair.round()
    pair.pd.cache.reset()
    pair.settle()
    assert "cat" not in pair.pd.cache
    assert "dog" in pair.pd.cache, "what was on its way is unharmed"
    assert pair.pd.encode_here("r", 0)
    pair.pd.finish("r")
    assert_everything_is_back(pair.pd)


def test_an_item_evicted_just_before_a_reset_gives_its_slot_back(pair: Pair) -> None:
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    pair.pd.finish("r")
    assert pair.pd.cache.evict_idle({"cat"}) == "cat"
    assert_everything_is_back(pair.pd)


# -- a request that is cancelled at every point --------------------------------------------------


def _expected(pair: Pair) -> None:
    """Do nothing: the request has only arrived."""


def _announced(pair: Pair) -> None:
    pair.encode.submit(CAT)
    pair.to_pd()


def _granted(pair: Pair) -> None:
    pair.encode.submit(CAT)
    pair.to_pd()
    pair.pd.step()


def _grant_known(pair: Pair) -> None:
    _granted(pair)
    pair.to_encode()


def _writing(pair: Pair) -> None:
    _grant_known(pair)
    pair.encode.session.output_ready("cat")
    pair.encode.poll()
    assert pair.encode.writes


def _written(pair: Pair) -> None:
    _writing(pair)
    pair.encode.finish_write("t-cat")
    pair.to_pd()


def _landed(pair: Pair) -> None:
    _written(pair)
    pair.pd.receiver.tick()


def _placed(pair: Pair) -> None:
    _written(pair)
    assert len(pair.pd.step()) == 1


def _lease_expired(pair: Pair) -> None:
    _writing(pair)
    pair.pd.clock.now += LEASE_S + LEASE_MARGIN_S
    pair.pd.step()


def _deadline_passed(pair: Pair) -> None:
    _granted(pair)
    pair.pd.clock.now += TIMEOUT_S
    pair.pd.step()


POINTS = [
    _expected,
    _announced,
    _granted,
    _grant_known,
    _writing,
    _written,
    _landed,
    _placed,
    _lease_expired,
    _deadline_passed,
]


@pytest.mark.parametrize("copies", [False, True], ids=["views", "copies"])
@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize("reach", POINTS, ids=lambda point: point.__name__.strip("_"))
def test_everything_is_back_after_a_request_was_cancelled_when_its_item_was(
    reach: Callable[[Pair], None], path: str, copies: bool
) -> None:
    pair = Pair(PrefillSide(path=path, copies=copies))
    pair.pd.arrive("r", CAT)
    reach(pair)
    pair.pd.finish("r")
    pair.settle()
    assert len(pair.encode.session) == 0 or not pair.encode.writes
    pair.pd.clock.now += TIMEOUT_S
    pair.settle()
    assert len(pair.encode.session) == 0
    assert_everything_is_back(pair.pd)


@pytest.mark.parametrize("reach", POINTS[1:-2], ids=lambda point: point.__name__.strip("_"))
def test_another_request_still_gets_the_item_after_one_was_cancelled_when_it_was(
    reach: Callable[[Pair], None],
) -> None:
    pair = Pair()
    pair.pd.arrive("r", CAT)
    pair.pd.arrive("s", Item("cat", transfer_id="t-other"))
    reach(pair)
    pair.pd.finish("r")
    pair.encode.session.output_ready("cat")
    pair.settle()
    assert sources(pair.pd, "s") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


def test_outcomes_name_each_item_once_in_the_order_of_the_prompt(pair: Pair) -> None:
    pair.pd.arrive("r", DOG, CAT, DOG)
    pair.encode.submit(CAT, ready=True)
    pair.encode.submit(DOG, ready=True)
    pair.settle()
    outcome = pair.pd.finish("r")
    assert outcome is not None
    assert outcome.instance == "prefill_decode-0"
    assert [item.mm_hash for item in outcome.items] == ["dog", "cat"]
    assert all(isinstance(item, ItemOutcome) for item in outcome.items)


def test_closing_closes_the_endpoint(pair: Pair) -> None:
    pair.pd.receiver.close()
    assert pair.pd.mailbox.is_closed
