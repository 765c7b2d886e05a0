"""The PD scheduler's side: from a request's arrival to the placement of its items."""

from __future__ import annotations

import threading
import time

import pytest

from epd_portable.scheduling.items import State
from epd_portable.wire.messages import EncodeFailed, Later
from epd_portable.wire.params import ItemOutcome
from tests.unit.runners.harness import (
    CAT,
    DOG,
    TOKEN_BYTES,
    Item,
    Pair,
    PrefillSide,
    assert_everything_is_back,
    sources,
)

pytestmark = pytest.mark.usefixtures("either_preallocation")


@pytest.fixture
def pair() -> Pair:
    return Pair()


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
    receiver.take_in()
    receiver.orders.take_orders([], computes=True)
    receiver.orders.take_orders(pair.pd.cache.get_freed_mm_hashes(), computes=True)
    receiver.step_done()
    assert pool.free_bytes < pool.capacity_bytes, "only the first of two steps has ended"
    receiver.step_done()
    assert pool.free_bytes == pool.capacity_bytes


def test_a_request_without_items_is_none_of_its_business(pair: Pair) -> None:
    assert pair.pd.prefill.may_schedule("unknown", 0)
    assert pair.pd.prefill.finished("unknown") is None


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
    assert pair.pd.cache.holders("cat") == {"s"}
    assert pair.pd.cache.num_freeable_slots == 98, "a held item is not idle"
    assert sources(pair.pd, "s") == {"cat": "encoder_cache"}
    assert_everything_is_back(pair.pd)


# -- what may be computed ------------------------------------------------------------------------


def test_text_before_a_missing_item_may_be_computed_and_the_item_may_not(pair: Pair) -> None:
    pair.pd.arrive("r", CAT, DOG)  # token 0 text, 1-2 cat, 3 text, 4-5 dog
    may = pair.pd.prefill.may_schedule
    assert [may("r", computed) for computed in (0, 1)] == [True, False]
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    assert [may("r", computed) for computed in (0, 1, 3, 4)] == [True, True, True, False]


def test_an_item_to_encode_here_may_be_computed_when_there_is_room() -> None:
    pd = PrefillSide(cache_tokens=3)
    pd.arrive("big", Item("held", 3))
    assert pd.encode_here("big", 0)
    pd.arrive("r", Item("local", 2))
    pd.step()
    assert not pd.prefill.may_schedule("r", 1)
    assert not pd.encode_here("r", 0)
    pd.finish("big")
    pd.receiver.before_step()
    assert pd.cache.num_free_slots == 1, "its room is set aside before it is scheduled"
    assert pd.prefill.may_schedule("r", 1)
    assert pd.encode_here("r", 0)


def test_room_for_an_item_to_encode_here_is_given_back_if_its_request_goes() -> None:
    pd = PrefillSide()
    pd.arrive("r", Item("local", 2))
    assert pd.cache.num_free_slots == 98
    pd.finish("r")
    assert pd.cache.num_free_slots == 100
    assert_everything_is_back(pd)


def test_a_request_begins_when_all_its_items_have_room_or_nobody_waits_before_it() -> None:
    pd = PrefillSide(cache_tokens=4)
    pd.arrive("r", Item("r1", 3))
    pd.arrive("s", Item("s1", 1), Item("s2", 2))
    pd.arrive("t", Item("t1", 1))

    def may_start(request_id: str, hit: int = 0) -> bool:
        return pd.prefill.may_schedule(request_id, hit, running=False)

    assert [may_start(name) for name in "rst"] == [True, False, False]
    assert pd.prefill.may_schedule("r", 0)
    assert [may_start(name) for name in "st"] == [True, False]
    assert may_start("t", 2), "the prefix cache covers all that it waits for"
    assert not may_start("s", 3), "s2 has no room"
    pd.finish("r")
    pd.receiver.before_step()
    assert [may_start(name) for name in "st"] == [True, False], "t is covered no more"
    pd.receiver.before_step()
    assert [may_start(name) for name in "st"] == [True, True]
    for name in "st":
        pd.finish(name)
    assert_everything_is_back(pd)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_an_item_is_needed_as_many_tokens_early_as_the_engine_looks_ahead(lookahead: int) -> None:
    pd = PrefillSide(lookahead=lookahead)
    pd.arrive("r", DOG, CAT)  # 1-2 dog, 4-5 cat
    needed = [not pd.prefill.may_schedule("r", computed, running=False) for computed in (0, 3)]
    assert needed == [lookahead >= 1, lookahead >= 1]


def test_an_awaited_item_is_not_encoded_here_until_its_transfer_failed(pair: Pair) -> None:
    pair.pd.arrive("r", CAT)
    assert not pair.pd.encode_here("r", 0)
    pair.pd.mailbox.inbox.append((b"router", EncodeFailed(transfer_id="t-cat", reason="")))
    pair.round()
    assert pair.pd.prefill.may_schedule("r", 1)
    assert pair.pd.encode_here("r", 0)
    assert sources(pair.pd, "r") == {"cat": "local"}
    assert_everything_is_back(pair.pd)


def test_an_item_that_the_prefix_cache_covers_is_given_up(pair: Pair) -> None:
    pair.pd.arrive("r", CAT, DOG)
    pair.encode.submit(CAT)
    pair.encode.submit(DOG, ready=True)
    pair.round()
    assert pair.pd.prefill.may_schedule("r", 3)
    pair.settle()
    assert set(pair.encode.ended) == {"t-cat", "t-dog"}
    assert sources(pair.pd, "r") == {"cat": "prefix_cache", "dog": "transfer"}
    assert_everything_is_back(pair.pd)


def test_an_item_is_kept_though_the_prefix_cache_would_cover_it_until_its_request_runs(
    pair: Pair,
) -> None:
    """There may be no memory to begin with now, and another hit later."""
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT)
    pair.round()
    assert pair.pd.prefill.may_schedule("r", 3, running=False)
    pair.round()
    assert pair.encode.ended == []
    assert not pair.pd.prefill.may_schedule("r", 1, running=False), "the hit is gone"
    assert pair.pd.receiver.cache.requests["r"].mm_inputs_done == 0
    pair.encode.session.output_ready("cat")
    pair.settle()
    assert pair.pd.prefill.may_schedule("r", 1, running=False)
    assert sources(pair.pd, "r") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


def test_a_preempted_request_keeps_its_items(pair: Pair) -> None:
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    pair.pd.prefill.may_schedule("r", 2)
    pair.pd.cache.free(pair.pd.requests["r"])
    assert pair.pd.cache.holders("cat") == {"r"}
    assert pair.pd.prefill.may_schedule("r", 1, running=False)
    assert pair.pd.encode_here("r", 0), "it is there"
    assert sources(pair.pd, "r") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


def test_what_a_hit_covers_after_a_preemption_is_given_up_again(pair: Pair) -> None:
    """The item was gone when the request was asked for first, and had to be encoded then."""
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    assert pair.pd.prefill.may_schedule("r", 3)
    pair.pd.cache.free_encoder_input(pair.pd.requests["r"], 0)
    pair.pd.forget_everything()
    pair.pd.cache.free(pair.pd.requests["r"])
    assert pair.pd.prefill.may_schedule("r", 1, running=False)
    assert pair.pd.cache.num_free_slots == 98
    assert pair.pd.prefill.may_schedule("r", 3, running=False)
    assert "r" in pair.pd.cache.unsettled
    assert pair.pd.prefill.may_schedule("r", 3)
    assert pair.pd.cache.num_free_slots == 100, "nobody else could have it while r runs"
    assert "r" not in pair.pd.cache.unsettled, "the engine need not ask any more"
    assert sources(pair.pd, "r") == {"cat": "transfer"}
    assert_everything_is_back(pair.pd)


@pytest.mark.parametrize("evicted", [False, True])
def test_a_request_that_is_preempted_beyond_an_item_needs_it_again(evicted: bool) -> None:
    pair = Pair(PrefillSide(cache_tokens=4))
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    assert pair.pd.prefill.may_schedule("r", 3)
    assert "r" not in pair.pd.cache.unsettled, "the engine need not ask any more"
    if evicted:
        pair.pd.arrive("s", Item("large", 4))
        pair.pd.receiver.before_step()
        assert pair.pd.encode_here("s", 0)
        pair.pd.finish("s")
    pair.pd.cache.free(pair.pd.requests["r"])
    assert "r" in pair.pd.cache.unsettled
    assert not pair.pd.prefill.may_schedule("r", 1, running=False), "it claims its item again"
    pair.pd.receiver.before_step()
    assert pair.pd.prefill.may_schedule("r", 1, running=False)
    assert ("cat" in pair.pd.cache) != evicted
    assert pair.pd.encode_here("r", 0)
    assert sources(pair.pd, "r") == {"cat": "local" if evicted else "transfer"}
    assert_everything_is_back(pair.pd)


def test_a_request_takes_nothing_from_one_that_the_same_step_computes_already() -> None:
    """Both were preempted; s was the last of them, and so is the first to be asked."""
    pd = PrefillSide(cache_tokens=4)
    pd.arrive("r", Item("a", 3))
    assert pd.encode_here("r", 0)
    assert pd.prefill.may_schedule("r", 4)
    pd.arrive("s", Item("x", 2), Item("y", 4))
    assert pd.encode_here("s", 0)
    pd.computed.update(r=4, s=1)
    pd.step()
    for request_id in "rs":
        pd.cache.free(pd.requests[request_id])
    pd.receiver.before_step()
    assert pd.prefill.may_schedule("s", 1, running=False)
    assert pd.cache.check_and_update_cache(pd.requests["s"], 0)
    assert not pd.prefill.may_schedule("r", 1, running=False), "s has the room that it needs"
    assert "x" in pd.cache
    assert "x" not in pd.cache.get_freed_mm_hashes(), "the step that reads it would forget it"
    pd.receiver.before_step()
    assert pd.prefill.may_schedule("r", 1, running=False), "between steps, s makes way"
    for request_id in "rs":
        pd.finish(request_id)
    assert_everything_is_back(pd)


@pytest.mark.parametrize("granted", [False, True])
def test_an_item_that_the_prefix_cache_comes_to_cover_while_it_is_awaited_is_given_up(
    granted: bool,
) -> None:
    """Another request has computed the same beginning meanwhile."""
    pair = Pair(PrefillSide(pool_tokens=2))
    pair.pd.arrive("first", DOG)
    if not granted:  # DOG takes the only slot
        pair.encode.submit(DOG)
        pair.round()
    else:
        pair.pd.finish("first")
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.round()
    assert bool(pair.encode.writes) == granted
    assert not pair.pd.prefill.may_schedule("r", 1)
    assert pair.pd.prefill.may_schedule("r", 3)
    pair.settle()
    assert "t-cat" in pair.encode.ended
    assert "cat" not in pair.pd.cache
    assert sources(pair.pd, "r") == {"cat": "prefix_cache"}
    if not granted:
        pair.pd.finish("first")
        pair.settle()
    assert_everything_is_back(pair.pd)


def test_progress_counts_items_that_lie_wholly_in_what_is_computed(pair: Pair) -> None:
    pair.pd.arrive("r", CAT, DOG, CAT)  # 1-2 cat, 4-5 dog, 7-8 cat
    record = pair.pd.receiver.cache.requests["r"]
    counted = []
    for computed in (0, 2, 3, 5, 6, 4, 9):
        pair.pd.prefill.may_schedule("r", computed)
        counted.append(record.mm_inputs_done)
    assert counted == [0, 0, 1, 1, 2, 2, 3], "and never fewer, after a preemption either"
    assert not record.claims, "everything is given up"
    pair.pd.finish("r")
    assert_everything_is_back(pair.pd)


def test_the_outcome_tells_how_many_items_were_computed_in_the_end(pair: Pair) -> None:
    pair.pd.arrive("r", CAT, DOG)
    pair.pd.computed["r"] = 4
    outcome = pair.pd.finish("r")
    assert outcome is not None
    assert (outcome.mm_inputs_done, outcome.mm_inputs_total) == (1, 2)


def test_an_item_that_comes_twice_in_a_prompt_is_needed_until_its_last_place(pair: Pair) -> None:
    pair.pd.arrive("r", CAT, CAT)
    assert not pair.pd.prefill.may_schedule("r", 4), "past the first place, before the second"
    pair.encode.submit(CAT, ready=True)
    assert len(pair.settle()) == 1
    engine_request = pair.pd.requests["r"]
    pair.pd.cache.free_encoder_input(engine_request, 0)
    assert pair.pd.cache.holders("cat") == {"r"}
    pair.pd.cache.free_encoder_input(engine_request, 1)
    assert pair.pd.cache.holders("cat") == frozenset()
    assert pair.pd.cache.num_freeable_slots == 100
    pair.pd.finish("r")
    assert_everything_is_back(pair.pd)


# -- placements ----------------------------------------------------------------------------------


def deliver(pair: Pair, request_id: str, item: Item, *, digest: str = "") -> None:
    """A request for an item comes, and the item: it lands when messages are next taken in."""
    pair.pd.arrive(request_id, item)
    pair.encode.submit(item, ready=True)
    pair.round()
    pair.encode.finish_write(item.transfer_id, digest=digest)
    pair.to_pd()


def placed(pair: Pair, *, computes: bool) -> list[str]:
    return [item.mm_hash for item in pair.pd.step(computes=computes)]


def test_an_item_whose_slot_is_its_tensor_is_placed_in_a_step_that_computes() -> None:
    pair = Pair(PrefillSide(copies=False))
    deliver(pair, "r", CAT)
    assert placed(pair, computes=False) == []
    assert placed(pair, computes=True) == ["cat"]
    assert pair.pd.pool.free_bytes < pair.pd.pool.capacity_bytes


def test_an_item_is_copied_in_any_step_but_its_slot_is_free_when_one_has_ended_that_computes() -> (
    None
):
    pair = Pair(PrefillSide(copies=True))
    receiver, pool = pair.pd.receiver, pair.pd.pool
    deliver(pair, "r", CAT)
    assert placed(pair, computes=False) == ["cat"]
    assert placed(pair, computes=False) == []
    assert pool.free_bytes < pool.capacity_bytes, "nobody knows that all ranks have read the slot"
    assert receiver.orders.take_orders([], computes=True).computes
    assert receiver.orders.take_orders([], computes=True).computes
    assert pool.free_bytes < pool.capacity_bytes
    receiver.step_done()
    assert pool.free_bytes == pool.capacity_bytes


def test_an_item_that_workers_compare_with_a_digest_is_placed_in_a_step_that_computes() -> None:
    pair = Pair(PrefillSide(copies=True))
    deliver(pair, "r", CAT, digest="sha256")
    assert placed(pair, computes=False) == []
    assert placed(pair, computes=True) == ["cat"]
    assert pair.pd.pool.free_bytes == pair.pd.pool.capacity_bytes


def test_what_was_copied_and_evicted_gives_its_slot_to_who_waits_while_nobody_computes() -> None:
    pair = Pair(PrefillSide(pool_tokens=2, copies=True))
    deliver(pair, "r", CAT)
    assert placed(pair, computes=False) == ["cat"]
    pair.pd.finish("r")
    pair.pd.arrive("s", DOG)
    for _ in range(3):
        assert placed(pair, computes=False) == []
    assert pair.pd.cache.items["dog"].state is State.RESERVED
    pair.pd.finish("s")
    assert pair.pd.pool.free_bytes == pair.pd.pool.capacity_bytes


@pytest.mark.parametrize("copies", [False, True])
def test_an_item_evicted_while_its_placement_waits_for_tokens_is_not_placed(copies: bool) -> None:
    pair = Pair(PrefillSide(copies=copies))
    deliver(pair, "r", CAT, digest="sha256")
    assert placed(pair, computes=False) == []
    pair.pd.finish("r")
    pair.pd.forget_everything()
    assert placed(pair, computes=True) == []
    assert pair.pd.pool.free_bytes == pair.pd.pool.capacity_bytes


@pytest.mark.parametrize("copies", [False, True])
def test_an_item_evicted_before_its_placement_is_not_placed(copies: bool) -> None:
    pair = Pair(PrefillSide(cache_tokens=2, copies=copies))
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.round()
    pair.encode.finish_write("t-cat")
    pair.to_pd()
    pair.pd.receiver.take_in()  # has landed
    pair.pd.finish("r")
    pair.pd.arrive("s", Item("local", 2))
    assert pair.pd.encode_here("s", 0), "takes the room of the idle cat"
    assert not pair.pd.receiver.orders.take_orders(
        pair.pd.cache.get_freed_mm_hashes(), computes=True
    ).placements
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
    pair.pd.arrive("s", Item("large", 100))
    assert "cat" not in pair.pd.cache
    pair.pd.finish("s")
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


# -- rest ----------------------------------------------------------------------------------------


def rested_s(pair: Pair, timeout_s: float = 5.0) -> float:
    begin_s = time.monotonic()
    pair.pd.receiver.rest(timeout_s)
    return time.monotonic() - begin_s


def test_an_engine_does_not_rest_while_no_request_waits_for_items(pair: Pair) -> None:
    assert rested_s(pair) < 2.5
    pair.pd.arrive("r", CAT)
    pair.pd.computed["r"] = 3
    pair.pd.step()
    assert rested_s(pair) < 2.5


def test_a_rest_ends_by_itself(pair: Pair) -> None:
    pair.pd.arrive("r", CAT)
    pair.pd.step()
    assert 0.01 <= rested_s(pair, 0.01) < 2.5


def test_a_message_ends_a_rest_also_one_that_came_before_it(pair: Pair) -> None:
    pair.pd.arrive("r", CAT)
    pair.pd.step()
    pair.encode.submit(CAT, ready=True)
    pair.to_pd()
    for before in (True, False):
        pair.pd.receiver.before_step()
        pair.pd.mailbox.inbox.append((b"encode", Later(transfer_id="x")))
        timer = threading.Timer(0.0 if before else 0.05, pair.pd.receiver.take_in)
        timer.start()
        if before:
            timer.join()
        assert rested_s(pair) < 2.5
        timer.join()
    pair.pd.receiver.before_step()
    assert rested_s(pair, 0.01) >= 0.01, "what a step has seen does not end the next rest"
