"""The PD scheduler's side: from a request's arrival to the placement of its items."""

from __future__ import annotations

import pytest

from epd_portable.items.table import State
from epd_portable.wire.messages import Grant, Later
from tests.unit.items.harness import (
    CAT,
    DOG,
    TIMEOUT_S,
    TOKEN_BYTES,
    Item,
    Pair,
    PrefillSide,
    assert_everything_is_back,
    sources,
)


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


def test_a_request_without_items_is_none_of_its_business(pair: Pair) -> None:
    assert pair.pd.prefill.may_schedule("unknown", 0)
    assert pair.pd.prefill.finished("unknown") is None


def test_text_before_a_missing_item_may_be_computed(pair: Pair) -> None:
    pair.pd.arrive("r", CAT, DOG)  # token 0 text, 1-2 cat, 3 text, 4-5 dog
    may = pair.pd.prefill.may_schedule
    assert [may("r", computed) for computed in (0, 1)] == [True, False]
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    assert [may("r", computed) for computed in (0, 1, 3, 4)] == [True, True, True, False]


def test_request_begins_with_space_for_all_items_or_as_first() -> None:
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
    pd.shell.before_step()
    assert [may_start(name) for name in "st"] == [True, False], "t is covered no more"
    pd.shell.before_step()
    assert [may_start(name) for name in "st"] == [True, True]
    for name in "st":
        pd.finish(name)
    assert_everything_is_back(pd)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_item_is_needed_early_by_the_lookahead(lookahead: int) -> None:
    pd = PrefillSide(lookahead=lookahead)
    pd.arrive("r", DOG, CAT)  # 1-2 dog, 4-5 cat
    needed = [not pd.prefill.may_schedule("r", computed, running=False) for computed in (0, 3)]
    assert needed == [lookahead >= 1, lookahead >= 1]
    assert pd.prefill.take_sleepers() == (["r", "r"] if lookahead else [])
    pd.prefill.may_schedule("r", 1)
    assert pd.prefill.take_sleepers() == [], "it runs, and is queried in each step"


def test_start_for_little_text_is_held_back_while_others_compute() -> None:
    pd = PrefillSide(min_start_tokens=4)
    pd.arrive("r", CAT, lead=3)
    found = []
    for is_busy in (True, True, False):
        found.append(pd.prefill.take_woken(is_busy=is_busy))
        found.append(pd.prefill.may_schedule("r", 0, running=False))
    assert found == [["r"], False, [], False, ["r"], True]


def test_request_without_progress_is_found_and_encodes_its_item() -> None:
    pd = PrefillSide()
    pd.arrive("r", CAT, lead=0)
    pd.shell.pause(waiting=True, running=True)  # Its transfer has no deadline meanwhile.
    found = []
    for _ in range(2 * int(TIMEOUT_S) + 1):
        found.append(pd.prefill.find_stalled(computed=False, starts=True))
        pd.clock.now += 1
    assert (found[:-1], found[-1]) == ([""] * (len(found) - 1), "r")
    assert not pd.encode_here("r", 0)
    pd.prefill.end_stalled("r")
    pd.shell.before_step()
    assert pd.encode_here("r", 0)


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


@pytest.mark.parametrize("evicted", [False, True])
def test_request_preempted_beyond_item_needs_it_again(evicted: bool) -> None:
    pair = Pair(PrefillSide(cache_tokens=4))
    pair.pd.arrive("r", CAT)
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    assert pair.pd.prefill.may_schedule("r", 3)
    assert "r" not in pair.pd.cache.incomplete, "the engine need not ask any more"
    if evicted:
        pair.pd.arrive("s", Item("large", 4))
        pair.pd.shell.before_step()
        assert pair.pd.encode_here("s", 0)
        pair.pd.finish("s")
    pair.pd.cache.free(pair.pd.requests["r"])
    assert "r" in pair.pd.cache.incomplete
    assert not pair.pd.prefill.may_schedule("r", 1, running=False), "it claims its item again"
    pair.pd.shell.before_step()
    assert pair.pd.prefill.may_schedule("r", 1, running=False)
    assert ("cat" in pair.pd.cache) != evicted
    assert pair.pd.encode_here("r", 0)
    assert sources(pair.pd, "r") == {"cat": "local" if evicted else "transfer"}
    assert_everything_is_back(pair.pd)


def test_progress_counts_wholly_computed_items(pair: Pair) -> None:
    pair.pd.arrive("r", CAT, DOG, CAT)  # 1-2 cat, 4-5 dog, 7-8 cat
    record = pair.pd.shell.cache.requests["r"]
    counted = []
    for computed in (0, 2, 3, 5, 6, 4, 9):
        pair.pd.prefill.may_schedule("r", computed)
        counted.append(record.mm_inputs_done)
    assert counted == [0, 0, 1, 1, 2, 2, 3], "and never fewer, after a preemption either"
    assert not record.claims, "everything is given up"
    pair.pd.finish("r")
    assert_everything_is_back(pair.pd)


def deliver(pair: Pair, request_id: str, item: Item) -> None:
    """A request for an item comes, and the item: it lands when messages are next taken in."""
    pair.pd.arrive(request_id, item)
    pair.encode.submit(item, ready=True)
    pair.round()
    pair.encode.finish_write(item.transfer_id)
    pair.to_pd()


def placed(pair: Pair, *, computes: bool) -> list[str]:
    return [item.mm_hash for item in pair.pd.step(computes=computes)]


def test_viewed_item_is_placed_in_a_step_that_computes(pair: Pair) -> None:
    deliver(pair, "r", CAT)
    assert placed(pair, computes=False) == []
    assert placed(pair, computes=True) == ["cat"]
    assert pair.pd.pool.free_bytes < pair.pd.pool.capacity_bytes


def test_slot_is_free_after_a_step_that_computes() -> None:
    pair = Pair(PrefillSide(copies=True))
    receiver, pool = pair.pd.shell, pair.pd.pool
    deliver(pair, "r", CAT)
    assert placed(pair, computes=False) == ["cat"]
    assert placed(pair, computes=False) == []
    assert pool.free_bytes < pool.capacity_bytes, "nobody knows that all ranks have read the slot"
    assert receiver.orders.take_orders([], computes=True).computes
    assert receiver.orders.take_orders([], computes=True).computes
    assert pool.free_bytes < pool.capacity_bytes
    receiver.step_done()
    assert pool.free_bytes == pool.capacity_bytes


def test_evicted_item_frees_its_slot_in_an_idle_engine() -> None:
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


def test_request_does_not_wait_for_transfers_of_later_ones(pair: Pair) -> None:
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


def test_slots_freed_by_a_step_serve_the_next_in_it() -> None:
    pair = Pair(PrefillSide(pool_tokens=2))
    pair.pd.arrive("r", CAT)
    pair.pd.arrive("s", DOG)
    for item in (CAT, DOG):
        pair.encode.submit(item, ready=True)
    pair.settle()
    pair.pd.finish("r")
    receiver, cache = pair.pd.shell, pair.pd.cache
    receiver.take_in()
    assert granted(pair) == []
    receiver.orders.take_orders(cache.get_freed_mm_hashes(), computes=True)
    receiver.step_done()
    assert granted(pair) == ["t-dog"], "without another message or step"


def granted(pair: Pair) -> list[str]:
    """Return the transfers that were granted since the last round."""
    return [
        message.transfer_id for _, message in pair.pd.mailbox.outbox if isinstance(message, Grant)
    ]


def test_engine_rests_until_a_message_for_a_waiting_request(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = pair.pd.shell
    rests: list[tuple[float, bool]] = []
    news = receiver._has_news
    monkeypatch.setattr(
        news, "wait", lambda timeout_s: rests.append((timeout_s, news.is_set())) is None
    )
    receiver.rest(1.0)
    assert rests == [], "no request waits for items"
    pair.pd.arrive("r", CAT)
    pair.pd.step()
    receiver.rest(2.0)
    pair.pd.mailbox.inbox.append((b"encode", Later(transfer_id="x")))
    receiver.take_in()
    receiver.rest(3.0)
    receiver.before_step()
    receiver.rest(4.0)
    assert rests == [(2.0, False), (3.0, True), (4.0, False)]
