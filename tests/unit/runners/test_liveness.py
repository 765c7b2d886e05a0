"""Requests end, in an order that starves nobody: one test for each way in which they once did not.

`tests/property/engine_model` looks for others, over vLLM's own schedulers.
"""

from __future__ import annotations

import pytest

from epd_portable.scheduling.items import State
from epd_portable.wire.messages import EncodeFailed
from tests.unit.runners.engine import Engine
from tests.unit.runners.harness import (
    TIMEOUT_S,
    EncodeSide,
    Item,
    Pair,
    PrefillSide,
    assert_everything_is_back,
)


class Bench:
    """A pair whose prefill+decode side is stepped by an engine."""

    def __init__(self, pd: PrefillSide, **engine: int) -> None:
        self.pair = Pair(pd)
        self.pd = pd
        self.encode: EncodeSide = self.pair.encode
        self.engine = Engine(pd, **engine)

    def add(self, request_id: str, *items: Item, ready: bool = True, hit: int = 0) -> None:
        self.engine.add(request_id, *items, hit=hit)
        for item in items:
            if item.transfer_id:
                self.encode.submit(item, ready=ready)

    def round(self) -> None:
        """Messages, a step, messages, and the end of every write."""
        self.pair.to_pd()
        self.engine.step()
        self.pair.to_encode()
        self.encode.poll()
        for transfer_id in list(self.encode.writes):
            self.encode.finish_write(transfer_id)

    def run(self, rounds: int = 40) -> list[str]:
        """Run until everybody has been answered; return the order."""
        for _ in range(rounds):
            if not self.engine.unfinished:
                break
            self.round()
        assert not self.engine.unfinished, "somebody waits for ever"
        return self.engine.answered

    def assert_settled(self) -> None:
        """Let what is under way end; nobody has anything then."""
        self.pair.settle()
        assert_everything_is_back(self.pd)


def moved(name: str, num_tokens: int = 2) -> Item:
    return Item(name, num_tokens, f"t-{name}")


def local(name: str, num_tokens: int = 2) -> Item:
    return Item(name, num_tokens)


def test_requests_with_local_and_transferred_items_do_not_keep_room_from_each_other() -> None:
    bench = Bench(PrefillSide(cache_tokens=4))
    bench.add("r", local("v1"), moved("i1"))
    bench.add("s", local("v2"), moved("i2"))
    assert bench.run() == ["r", "s"]
    bench.assert_settled()


def test_an_item_whose_transfer_failed_keeps_its_place_before_the_next_of_its_request() -> None:
    bench = Bench(PrefillSide(cache_tokens=4))
    bench.add("r", moved("a", 3), moved("b", 3), ready=False)
    bench.round()
    bench.pd.mailbox.inbox.append((b"router", EncodeFailed(transfer_id="t-a", reason="gone")))
    bench.encode.session.output_ready("b")
    assert bench.run() == ["r"]
    bench.assert_settled()


def test_a_large_local_item_is_not_overtaken_for_ever_by_small_transferred_ones() -> None:
    bench = Bench(PrefillSide(cache_tokens=4), seats=8)
    bench.add("first", moved("x", 2))
    bench.add("large", local("large", 4))
    for number in range(40):
        bench.add(f"small-{number}", moved(f"s{number}", 1))
        bench.round()
    position = bench.engine.answered.index("large")
    assert position <= 2, bench.engine.answered[:10]


def test_a_popular_item_does_not_keep_its_room_from_who_came_before() -> None:
    """Each newcomer finds it in the cache; together they would hold it for ever."""
    bench = Bench(PrefillSide(cache_tokens=4), seats=2)
    bench.add("p0", moved("popular", 3))
    bench.round()
    bench.add("large", moved("large", 4))
    for number in range(1, 30):
        bench.add(f"p{number}", Item("popular", 3, f"t-popular-{number}"))
        bench.round()
    assert "large" in bench.engine.answered
    bench.run(100)
    bench.assert_settled()


def test_a_prefix_hit_that_shrinks_before_the_request_runs_costs_it_nothing() -> None:
    bench = Bench(PrefillSide(cache_tokens=100), kv_tokens=20, seats=2)
    bench.add("other", *(local(f"o{n}", 4) for n in range(3)))
    bench.round()
    request = Item("cat", 6, "t-cat", has_media=False, sent_with_media=False)
    bench.add("r", request, hit=7, ready=False)
    bench.engine.kv_tokens = 0  # the hit is seen, and there is no memory to use it
    bench.round()
    bench.round()
    assert "cat" in bench.pd.cache.items, "the item was given up on a hit that nobody holds"
    bench.engine.kv_tokens = 100
    bench.engine.waiting[-1].hit = 0
    bench.encode.session.output_ready("cat")
    assert "r" in bench.run()
    assert not bench.engine.refused


def test_what_the_prefix_cache_covers_is_given_up_once_the_request_runs() -> None:
    bench = Bench(PrefillSide())
    bench.add("r", moved("cat", 4), hit=5, ready=False)
    bench.round()
    bench.round()
    assert bench.engine.answered == ["r"]
    assert bench.encode.ended or not bench.pd.cache.items
    bench.assert_settled()


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_picture_that_a_drafter_would_read_holds_nobody_up(lookahead: int) -> None:
    pd = PrefillSide(lookahead=lookahead)
    bench = Bench(pd, lookahead=lookahead)
    bench.add("r", moved("cat"), ready=False)
    bench.engine.add("text")
    bench.round()
    assert bench.engine.stopped_at == "", "the engine broke off its loop at the picture"
    assert bench.engine.answered == ["text"]
    bench.encode.session.output_ready("cat")
    assert bench.run() == ["text", "r"]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_transfer_accepted_as_one_item_may_be_named_as_another_of_the_same_request(
    leaves: bool,
) -> None:
    """Its slot is lost at that moment, and given back once."""
    bench = Bench(PrefillSide(preallocation="async"))
    bench.encode.submit(Item("x", 2, "t"), ready=False)
    bench.pair.to_pd()
    bench.round()
    assert bench.pd.cache.items["x"].state is State.GRANTED
    bench.engine.add("r", Item("y", 2, "t"), Item("x", 2))
    if leaves:
        bench.engine.abort("r")
    bench.round()
    bench.pd.clock.now += TIMEOUT_S
    assert bench.run() == ([] if leaves else ["r"])
    bench.assert_settled()


def test_who_has_a_seat_and_waits_comes_before_who_waits_for_a_seat() -> None:
    """One seat: its request loses its picture, which others' pictures have taken the room of."""
    bench = Bench(PrefillSide(cache_tokens=4, pool_tokens=8), seats=1)
    bench.add("early", moved("e", 2), ready=False)
    bench.add("late", local("l", 2), local("m", 2))
    bench.round()
    bench.round()
    bench.encode.session.output_ready("e")
    bench.pd.cache.reset()
    assert set(bench.run()) == {"early", "late"}
    bench.assert_settled()


def test_a_preempted_request_gets_its_items_again_though_others_wait_with_half_of_theirs() -> None:
    bench = Bench(PrefillSide(cache_tokens=4, pool_tokens=8), seats=2)
    bench.add("r", local("a", 2), local("b", 2))
    bench.add("s", local("c", 2), local("d", 2), local("e", 2))
    bench.engine.seats = 1
    for _ in range(6):
        bench.round()
        bench.engine.preempt()
    bench.engine.seats = 2
    assert set(bench.run()) == {"r", "s"}
    bench.assert_settled()


def test_who_has_room_and_waits_for_a_seat_does_not_keep_it_from_who_has_the_seat() -> None:
    """A drafter's lookahead lets the second begin before the first, whose picture has not come."""
    bench = Bench(PrefillSide(cache_tokens=4, lookahead=1), seats=1, lookahead=1)
    bench.add("first", moved("q", 3), ready=False)
    bench.add("second", local("a", 1), moved("b", 3))
    for _ in range(3):
        bench.round()
    bench.encode.session.output_ready("q")
    assert set(bench.run()) == {"first", "second"}
    bench.assert_settled()


def test_the_first_in_the_order_begins_once_nobody_else_has_room_and_no_seat() -> None:
    """Nothing about its own items changes then: it is woken for being the first."""
    bench = Bench(PrefillSide(cache_tokens=4), seats=2)
    awaited = moved("x", 1)
    bench.engine.add("r", awaited, lead=0)
    bench.encode.submit(awaited, ready=False)
    bench.engine.add("s", local("y", 2), local("z", 3), lead=0)
    for _ in range(3):
        bench.round()
    assert set(bench.engine.asleep) == {"r", "s"}
    bench.encode.session.output_ready("x")
    assert bench.run() == ["r", "s"]
    bench.assert_settled()
