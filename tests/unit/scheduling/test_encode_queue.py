from __future__ import annotations

import logging

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from epd_portable.scheduling.encode_queue import EncodeQueue, StepLimits
from epd_portable.scheduling.encoder_cache import EncoderCacheManager
from tests.unit.builders import FakeFeature


class FakeEncodeRequest:
    """What the queue reads of a request; its prompt has one token for each embedding."""

    def __init__(self, request_id: str, *items: tuple[str, int]) -> None:
        self.request_id = request_id
        self.mm_features = [FakeFeature(name) for name, _ in items]
        self.sizes = [size for _, size in items]
        self.num_prompt_tokens = sum(self.sizes)
        self.num_computed_tokens = 0

    def get_num_encoder_embeds(self, input_id: int) -> int:
        return self.sizes[input_id]


class Desk:
    """A queue over a cache of ten embeddings, and an engine that does as it is told."""

    def __init__(self, *, cache: int = 10, embeddings: int = 10, tokens: int = 100) -> None:
        self.cache = EncoderCacheManager(cache)
        self.queue = EncodeQueue(self.cache, StepLimits(embeddings=embeddings, tokens=tokens))
        self.requests: dict[str, FakeEncodeRequest] = {}

    def arrive(self, request_id: str, *items: tuple[str, int]) -> FakeEncodeRequest:
        arriving = self.requests[request_id] = FakeEncodeRequest(request_id, *items)
        self.queue.arrived(arriving)
        return arriving

    def step(self) -> list[str]:
        """Encode whoever may start, whole; the transfers of their items are still to come."""
        self.queue.admit()
        started = [name for name in self.requests if self.queue.may_start(name)]
        ended = {name: self.requests.pop(name) for name in started}
        for name, encoded in ended.items():
            for index, feature in enumerate(encoded.mm_features):
                if not self.cache.check_and_update_cache(encoded, index):
                    assert self.cache.can_allocate(encoded, index, 10**9, 0)
                    self.cache.allocate(encoded, index)
                self.cache.retain(feature.identifier, f"to {name}")
            encoded.num_computed_tokens = encoded.num_prompt_tokens
        self.queue.scheduled(started)
        for name in started:
            self.cache.free(ended[name])
            self.queue.withdraw(name)
        return started

    def transferred(self, request_id: str, *items: str) -> None:
        for mm_hash in items:
            self.cache.deallocate(mm_hash, f"to {request_id}")


def test_all_items_of_a_request_start_together() -> None:
    desk = Desk()
    desk.arrive("a", ("cat", 4), ("dog", 4))
    assert desk.step() == ["a"]
    assert "cat" in desk.cache and "dog" in desk.cache


def test_a_request_waits_whole_until_transfers_give_room_back() -> None:
    desk = Desk()
    desk.arrive("a", ("cat", 4), ("dog", 4))
    desk.arrive("b", ("emu", 2), ("fox", 4))
    assert desk.step() == ["a"]
    assert desk.step() == []
    desk.transferred("a", "cat")
    assert desk.step() == ["b"]
    assert "emu" in desk.cache and "cat" not in desk.cache


def test_nobody_overtakes_the_first_that_does_not_fit() -> None:
    desk = Desk()
    desk.arrive("a", ("cat", 8))
    desk.arrive("b", ("dog", 8))
    desk.arrive("c", ("emu", 1))
    assert desk.step() == ["a"]
    assert desk.step() == []
    desk.transferred("a", "cat")
    assert desk.step() == ["b", "c"]


@pytest.mark.parametrize("limits", [{"embeddings": 6}, {"tokens": 6}])
def test_a_step_does_not_start_more_than_it_may_compute(limits: dict[str, int]) -> None:
    desk = Desk(cache=100, **limits)
    for name in "abc":
        desk.arrive(name, (f"{name}'s", 3))
    assert [desk.step(), desk.step()] == [["a", "b"], ["c"]]


def test_an_item_in_the_cache_is_kept_and_not_computed_again() -> None:
    desk = Desk(embeddings=6)
    desk.arrive("a", ("cat", 5))
    desk.step()
    desk.transferred("a", "cat")
    desk.arrive("b", ("dog", 5), ("cat", 5))
    desk.arrive("c", ("cat", 5))
    assert desk.step() == ["b", "c"]
    assert desk.cache.holders("cat") == {"to b", "to c"}


def test_an_item_that_two_requests_bring_is_counted_once() -> None:
    desk = Desk(cache=10, embeddings=10)
    desk.arrive("a", ("cat", 6))
    desk.arrive("b", ("cat", 6), ("dog", 4))
    assert desk.step() == ["a", "b"]


def test_cached_items_of_a_request_that_must_wait_can_still_make_room() -> None:
    desk = Desk()
    desk.arrive("a", ("cat", 5))
    desk.step()
    desk.transferred("a", "cat")
    desk.arrive("b", ("dog", 5))
    desk.step()
    desk.arrive("c", ("cat", 5), ("emu", 5))
    assert desk.step() == []
    assert desk.cache.holders("cat") == frozenset()
    desk.transferred("b", "dog")
    assert desk.step() == ["c"]
    assert "dog" not in desk.cache


def test_admitted_requests_that_the_engine_left_out_hold_nothing() -> None:
    desk = Desk()
    desk.arrive("a", ("cat", 5))
    desk.step()
    desk.transferred("a", "cat")
    left_out = desk.arrive("b", ("cat", 5))
    desk.queue.admit()
    assert desk.queue.may_start("b")
    assert desk.cache.holders("cat") == {"b"}
    desk.queue.scheduled([])
    assert desk.cache.holders("cat") == frozenset()
    assert not desk.queue.may_start("b")
    assert not desk.cache.get_cached_input_ids(left_out)
    assert desk.step() == ["b"]


def test_a_request_that_never_fits_whole_starts_alone_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    desk.arrive("a", ("cat", 1))
    desk.arrive("b", ("dog", 6), ("emu", 6))
    desk.arrive("c", ("fox", 1))
    assert desk.step() == ["a"]

    desk.queue.admit()
    assert [name for name in "bc" if desk.queue.may_start(name)] == ["b"]
    with caplog.at_level(logging.WARNING):
        desk.queue.scheduled(["b"])
    assert "2 items have 12 embeddings" in caplog.text
    assert "its encoder cache holds 10; raise max_num_batched_tokens" in caplog.text

    desk.queue.admit()
    assert not desk.queue.may_start("c"), "b is not encoded yet"
    desk.requests["b"].num_computed_tokens = 12
    desk.queue.admit()
    assert desk.queue.may_start("c")


def test_an_aborted_request_in_parts_lets_the_next_one_start() -> None:
    desk = Desk()
    desk.arrive("a", ("dog", 6), ("emu", 6))
    desk.arrive("b", ("fox", 1))
    desk.queue.admit()
    desk.queue.scheduled(["a"])
    desk.queue.withdraw("a")
    desk.requests.pop("a")
    assert desk.step() == ["b"]


def test_an_item_beyond_a_limit_fails_its_request_once_and_blocks_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk(cache=10, embeddings=8)
    with caplog.at_level(logging.ERROR):
        desk.arrive("a", ("cat", 9))
    assert "9 embeddings, and a step of this encode instance computes 8" in caplog.text
    desk.arrive("b", ("dog", 1))
    assert desk.step() == ["b"]
    assert desk.queue.take_hopeless() == {"a"}
    assert desk.queue.take_hopeless() == set()


def test_a_hopeless_request_that_was_aborted_is_not_failed() -> None:
    desk = Desk()
    desk.arrive("a", ("cat", 11))
    desk.queue.withdraw("a")
    assert desk.queue.take_hopeless() == set()


NAMES = ["cat", "dog", "emu", "fox", "gnu"]
SIZES = {name: number + 1 for number, name in enumerate(NAMES)}


@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True), max_size=12
    ),
    acknowledged=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_everybody_starts_whole_and_in_order_however_transfers_end(
    arrivals: list[list[str]], acknowledged: list[bool]
) -> None:
    desk = Desk(cache=12, embeddings=12)
    open_transfers: list[tuple[str, list[str]]] = []
    for number, names in enumerate(arrivals):
        desk.arrive(f"r{number}", *((name, SIZES[name]) for name in names))
    started: list[str] = []
    answers = iter([*acknowledged, *[True] * 40])
    while desk.requests:
        now = desk.step()
        started += now
        open_transfers += [(name, arrivals[int(name[1:])]) for name in now]
        if open_transfers and next(answers):
            name, items = open_transfers.pop(0)
            desk.transferred(name, *items)
    assert started == [f"r{number}" for number in range(len(arrivals))]
    for name, items in open_transfers:
        desk.transferred(name, *items)
    assert desk.cache.num_freeable_slots == desk.cache.cache_size
