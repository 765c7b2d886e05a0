from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from epd_portable.encode.dispatcher import Dispatcher, EncodedItem
from epd_portable.encode.queue import EncodeQueue, StepLimits
from epd_portable.encode.two_levels import TwoLevelCache
from tests.unit.builders import SECRET, encode_params
from tests.unit.items.harness import spec


@dataclass(frozen=True)
class FakePlace:
    offset: int
    length: int


@dataclass(frozen=True)
class FakeFeature:
    identifier: str
    mm_position: FakePlace


class FakeEncodeRequest:
    """Part of a request that the queue reads; its prompt has one token for each embedding."""

    def __init__(self, request_id: str, *items: tuple[str, int]) -> None:
        self.request_id = request_id
        self.sizes = [size for _, size in items]
        self.mm_features = [
            FakeFeature(name, FakePlace(sum(self.sizes[:index]), size))
            for index, (name, size) in enumerate(items)
        ]
        self.num_prompt_tokens = self.total
        self.num_computed_tokens = 0

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def get_num_encoder_embeds(self, input_id: int) -> int:
        return self.sizes[input_id]


class Desk:
    """A queue over a cache of ten embeddings, and an engine that does as it is told.

    All is for one consumer unless said otherwise; a consumer is remembered for ten seconds.
    """

    def __init__(
        self, *, cache: int = 10, embeddings: int = 10, together: int = 10**9, tokens: int = 100
    ) -> None:
        self.cache = TwoLevelCache(cache, 0, lambda request, index: 1)
        self.dispatcher = Dispatcher(self.cache, SECRET)
        limits = StepLimits(embeddings=embeddings, together=together, tokens=tokens)
        self.queue = EncodeQueue(
            self.cache, limits, self.dispatcher, remember_s=10.0, preempt_after_s=3.0
        )
        self.requests: dict[str, FakeEncodeRequest] = {}
        self.now = 1000.0

    def arrive(
        self, request_id: str, *items: tuple[str, int], to: str = "pd", text: int = 0
    ) -> FakeEncodeRequest:
        arriving = self.requests[request_id] = FakeEncodeRequest(request_id, *items)
        arriving.num_prompt_tokens += text
        encoded = [EncodedItem(name, "image", spec(size)) for name, size in items]
        params = encode_params({f"{name} of {request_id}": name for name, _ in items}, to)
        self.dispatcher.request_arrived(request_id, encoded, params)
        self.queue.arrived(arriving, to, self.now)
        return arriving

    def admit(self) -> None:
        self.queue.admit(self.now)

    def preempted(self, after_s: float) -> list[str]:
        """Return the transfers that are preempted when nothing has started after some time."""
        self.now += after_s
        assert self.step() == []
        return self.dispatcher.preempt(self.queue.take_to_preempt())

    def step(self) -> list[str]:
        """Encode whoever may start, whole; the transfers of their items are still to come."""
        self.admit()
        started = [name for name in self.requests if self.queue.may_start(name)]
        ended = {name: self.requests.pop(name) for name in started}
        for name, encoded in ended.items():
            for index in range(len(encoded.mm_features)):
                if not self.cache.check_and_update_cache(encoded, index):
                    assert self.cache.can_allocate(encoded, index, 10**9, 0)
                    self.cache.allocate(encoded, index)
            self.dispatcher.take_orders([name])
            encoded.num_computed_tokens = encoded.num_prompt_tokens
        self.queue.scheduled(started)
        for name in started:
            self.cache.free(ended[name])
            self.queue.withdraw(name)
        return started

    def transferred(self, request_id: str, *items: str) -> None:
        ended = (f"{mm_hash} of {request_id}" for mm_hash in items)
        self.queue.delivered(self.dispatcher.transfers_ended(ended))

    def kept(self) -> Counter[str]:
        """Return the embeddings that are kept for each consumer."""
        kept: Counter[str] = Counter()
        for consumer, item in self.dispatcher.kept():
            kept[consumer] += item.num_embeds
        return kept


@pytest.mark.parametrize("limits", [{"embeddings": 6}, {"tokens": 6}])
def test_a_step_does_not_start_more_than_it_may_compute(limits: dict[str, int]) -> None:
    desk = Desk(cache=100, **limits)
    for name in "abc":
        desk.arrive(name, (f"{name}'s", 3))
    assert [desk.step(), desk.step()] == [["a", "b"], ["c"]]


def test_concurrent_starts_are_bounded_but_for_one_large() -> None:
    desk = Desk(cache=100, embeddings=50, together=6)
    for name, size in {"a": 3, "b": 3, "c": 3, "large": 40}.items():
        desk.arrive(name, (f"{name}'s", size))
    desk.arrive("cached", ("a's", 3))
    desk.arrive("d", ("d's", 1))
    assert [desk.step() for _ in range(4)] == [["a", "b"], ["c"], ["large", "cached"], ["d"]]


def test_an_item_in_the_cache_is_kept_and_not_computed_again() -> None:
    desk = Desk(cache=15)
    desk.arrive("a", ("cat", 5))
    desk.step()
    desk.transferred("a", "cat")
    desk.arrive("b", ("dog", 5), ("cat", 5))
    desk.arrive("c", ("cat", 5))
    desk.arrive("d", ("emu", 5))
    assert desk.step() == ["b", "c", "d"]
    assert desk.cache.holders("cat") == {"cat of b", "cat of c"}


def test_repeated_job_takes_nothing_until_its_transfer_has_ended() -> None:
    desk = Desk()
    desk.arrive("a", ("cat", 5))
    desk.step()
    desk.arrive("a", ("cat", 5))
    desk.arrive("b", ("dog", 5))
    assert desk.step() == ["b"]
    desk.transferred("a", "cat")
    assert desk.step() == ["a"]


def test_youngest_outputs_are_preempted_for_a_stalled_consumer() -> None:
    desk = Desk()
    for name, size in {"a": 4, "b": 3, "c": 3}.items():
        desk.arrive(name, (f"{name}'s", size))
    assert desk.step() == ["a", "b", "c"]
    desk.arrive("d", ("d's", 5))
    assert desk.preempted(5.0) == desk.preempted(2.9) == []
    assert desk.preempted(0.1) == ["c's of c", "b's of b"]
    assert desk.preempted(1.0) == [], "they are to end"
    desk.arrive("e", ("e's", 8))
    desk.transferred("c", "c's")
    desk.transferred("b", "b's")
    assert desk.step() == ["d"]
    assert desk.preempted(0.0) == ["d's of d", "a's of a"], "still nothing was taken"


@pytest.mark.parametrize("change", ["an item is taken", "no request waits"])
def test_outputs_stay_for_a_consumer_that_goes_on(change: str) -> None:
    desk = Desk()
    for name in "ab":
        desk.arrive(name, (f"{name}'s", 5))
    assert desk.step() == ["a", "b"]
    desk.arrive("c", ("c's", 10))
    assert desk.preempted(0.0) == desk.preempted(2.9) == []
    if change == "an item is taken":
        desk.transferred("a", "a's")
    else:
        desk.queue.withdraw("c")
        waiting = desk.requests.pop("c")
        desk.arrive("cached", ("a's", 5))
        assert desk.step() == ["cached"]
        desk.arrive("c", *((each.identifier, 10) for each in waiting.mm_features))
    assert desk.preempted(2.9) == desk.preempted(2.9) == []
    assert desk.preempted(0.1)


def test_consumer_preempts_outputs_beyond_a_share() -> None:
    desk = Desk()
    desk.arrive("a", ("cat", 6))
    desk.arrive("b", ("dog", 4))
    assert desk.step() == ["a", "b"]
    desk.arrive("c", ("emu", 3), to="another")
    desk.preempted(0.0)
    assert desk.preempted(3.0) == ["dog of b"]


def test_consumer_beyond_its_share_preempts_its_own_outputs() -> None:
    desk = Desk(cache=12)
    desk.arrive("a", ("cat", 2), to="another")
    desk.arrive("b", ("dog", 6))
    assert desk.step() == ["a", "b"]
    desk.arrive("c", ("emu", 4))
    desk.preempted(0.0)
    assert desk.preempted(3.0) == ["dog of b"]


def test_output_for_two_consumers_is_preempted_as_a_whole() -> None:
    desk = Desk(cache=20)
    desk.arrive("a", ("cat", 4))
    desk.arrive("b", ("dog", 6))
    desk.arrive("c", ("dog", 6), to="another")
    assert sorted([*desk.step(), *desk.step()]) == ["a", "b", "c"]
    assert sorted(desk.dispatcher.preempt({"pd": 1})) == ["cat of a", "dog of b"]
    assert desk.dispatcher.preempt({"another": 1}) == ["dog of c"]


def test_admitted_requests_that_the_engine_left_out_hold_nothing() -> None:
    desk = Desk()
    desk.arrive("a", ("cat", 5))
    desk.step()
    desk.transferred("a", "cat")
    left_out = desk.arrive("b", ("cat", 5))
    desk.admit()
    assert desk.queue.may_start("b")
    assert desk.cache.holders("cat") == {"b"}
    desk.queue.scheduled([])
    assert desk.cache.holders("cat") == frozenset()
    assert not desk.queue.may_start("b")
    assert not desk.cache.get_cached_input_ids(left_out)
    assert desk.step() == ["b"]


def test_the_prompt_of_one_item_may_take_several_steps() -> None:
    desk = Desk()
    film = desk.arrive("film", ("film", 6), text=200)
    desk.arrive("b", ("dog", 1))
    assert not desk.queue.is_empty
    desk.admit()
    assert [name for name in desk.requests if desk.queue.may_start(name)] == ["film"]
    film.num_computed_tokens = 100
    desk.queue.scheduled(["film"])
    assert desk.step() == ["film"], "of its next step it takes all tokens, too"
    assert desk.step() == ["b"] and desk.queue.is_empty


def test_room_is_kept_for_an_item_that_a_later_step_computes() -> None:
    desk = Desk(embeddings=100)
    film = desk.arrive("film", ("film", 6), text=100)
    desk.admit()
    film.num_computed_tokens = 90
    desk.queue.scheduled(["film"])
    desk.arrive("b", ("dog", 5))
    desk.arrive("c", ("cat", 4), to="another")
    desk.admit()
    assert [name for name in "bc" if desk.queue.may_start(name)] == ["c"]


@pytest.mark.parametrize(
    ("items", "text"),
    [([("cat", 9)], 0), ([("cat", 5), ("dog", 4)], 0), ([("a", 1), ("b", 1)], 99)],
)
def test_a_request_beyond_a_limit_fails_once_and_blocks_nobody(
    items: list[tuple[str, int]], text: int, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(cache=10, embeddings=8)
    with caplog.at_level(logging.ERROR):
        desk.arrive("a", *items, text=text)
    assert "a step of this encode instance computes 8 embeddings" in caplog.text
    desk.arrive("b", ("dog", 1))
    assert desk.step() == ["b"]
    assert desk.queue.take_too_large() == {"a"}
    assert desk.queue.take_too_large() == set()


def test_too_large_request_is_not_failed_when_aborted() -> None:
    desk = Desk()
    desk.arrive("a", ("cat", 11))
    desk.queue.withdraw("a")
    assert desk.queue.take_too_large() == set()


A, B, C = "abc"


def test_small_items_of_others_do_not_keep_a_large_one_waiting() -> None:
    desk = Desk()
    desk.arrive("c0", ("c0", 2), to=C)
    desk.arrive("b0", ("b0", 1), to=B)
    assert desk.step() == ["c0", "b0"]
    desk.arrive("a", ("cat", 9), to=A)
    for number in range(1, 5):
        desk.arrive(f"b{number}", (f"b{number}", 1), to=B)
    assert desk.step() == [], "of ten, nine are promised to a"
    desk.transferred("c0", "c0")
    assert desk.step() == ["a"]


def test_consumer_beyond_its_share_gets_held_items_again() -> None:
    desk = Desk()
    desk.arrive("a0", ("cat", 8), to=A)
    assert desk.step() == ["a0"]
    desk.arrive("b", ("dog", 1), to=B)
    desk.arrive("a1", ("cat", 8), to=A)
    desk.arrive("a2", ("emu", 1), to=A)
    assert desk.step() == ["b", "a1"], "a keeps no more with it, but with emu it would"


def test_item_held_for_another_counts_in_full() -> None:
    desk = Desk(cache=12, embeddings=12)
    for name, size in (("a", 4), ("b", 1), ("c", 4)):
        desk.arrive(name, (name, size), to=name)
    assert desk.step() == ["a", "b", "c"]
    desk.arrive("c1", ("a", 4), to=C)
    assert desk.step() == [], "once a has it, c alone would keep eight, and b's share is four"
    desk.transferred("c", "c")
    assert desk.step() == ["c1"]


def test_multistep_request_takes_no_claimed_space() -> None:
    desk = Desk(cache=12, embeddings=12)
    desk.arrive("a", ("cat", 8), to=A)
    assert desk.step() == ["a"]
    desk.arrive("b", ("dog", 5), to=B)
    desk.arrive("c", ("emu", 3), to=C, text=200)
    assert desk.step() == [], "four are left, and two of them are for c"
    desk.transferred("a", "cat")
    assert [desk.step(), desk.step()] == [["b"], ["c"]]


def test_space_that_one_waits_for_is_shared_with_few() -> None:
    desk = Desk(cache=12, embeddings=12)
    for name, size in (("a", 4), ("b", 9), ("c", 2)):
        desk.arrive(name, (name, size), to=name)
        assert desk.step() == (["a"] if name == "a" else []), "a keeps no more than its share"
    desk.transferred("a", "a")
    assert desk.step() == ["b", "c"]


def test_failed_item_holds_no_share() -> None:
    desk = Desk(cache=8)
    desk.arrive("b", ("emu", 1), to=B)
    desk.arrive("a1", ("cat", 4), to=A)
    assert desk.step() == ["b", "a1"]
    desk.cache.take_report(lost=set(), missing={"cat"})
    desk.arrive("a2", ("cat", 4), to=A)
    assert desk.step() == ["a2"], "a keeps nothing, and its share is four"
    desk.transferred("a1", "cat")
    assert desk.kept() == {"a": 4, "b": 1}
    desk.transferred("a2", "cat")
    desk.transferred("b", "emu")
    assert desk.cache.num_freeable_slots == 8
    assert not desk.dispatcher.busy


class Sharing(RuleBasedStateMachine):
    """Shares of one to four consumers, of which some do not end their transfers for a while."""

    @initialize(consumers=st.integers(1, 4))
    def begin(self, consumers: int) -> None:
        self.names = "abcd"[:consumers]
        self.desk = Desk(cache=12, embeddings=12)
        self.size = self.desk.cache.cache_size
        self.number = 0
        self.open: dict[str, list[str]] = {name: [] for name in self.names}
        self.waiting: dict[str, list[str]] = {name: [] for name in self.names}

    @rule(data=st.data(), size=st.integers(1, 12))
    def arrive(self, data: st.DataObject, size: int) -> None:
        consumer = data.draw(st.sampled_from(self.names))
        name = f"{consumer}{self.number}"
        self.number += 1
        self.desk.arrive(name, (name, size), to=consumer)
        self.waiting[consumer].append(name)

    @rule(data=st.data())
    def transfer_ends(self, data: st.DataObject) -> None:
        consumer = data.draw(st.sampled_from(self.names))
        if self.open[consumer]:
            name = self.open[consumer].pop(0)
            self.desk.transferred(name, name)

    @rule(seconds=st.sampled_from([0.0, 1.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.desk.now += seconds

    @rule()
    def steps(self) -> None:
        self.step()

    def step(self) -> list[str]:
        kept, requests = self.desk.kept(), dict(self.desk.requests)
        started = self.desk.step()
        for name in started:
            assert self.waiting[name[0]].pop(0) == name, "in order of arrival"
            self.open[name[0]].append(name)
        held_up = {
            consumer
            for consumer in self.names
            if self.waiting[consumer]
            and not kept[consumer]
            and not any(name[0] == consumer for name in started)
        }
        # Beyond an equal share nobody takes what another waits for who has nothing.
        for consumer in {name[0] for name in started} if held_up else ():
            sizes = [requests[name].sizes[0] for name in started if name[0] == consumer]
            share = self.size // len(held_up | {consumer})
            assert kept[consumer] + sum(sizes) <= share or (
                not kept[consumer] and len(sizes) == 1
            ), (consumer, held_up)
        return started

    @rule()
    def a_dead_consumer_stops_nobody_who_needs_no_more_than_its_part(self) -> None:
        """Everything ends but what is for the first; of the others all start that may."""
        for _ in range(60):
            for consumer in self.names[1:]:
                while self.open[consumer]:
                    name = self.open[consumer].pop(0)
                    self.desk.transferred(name, name)
            if not self.step():
                break
        room = self.size - self.desk.kept()["a"]
        first = {
            consumer: self.desk.requests[names[0]].sizes[0]
            for consumer, names in self.waiting.items()
            if names
        }
        if first.keys() - {"a"}:
            assert max(first.values()) > min(room, self.size // len(self.names))

    def teardown(self) -> None:
        if not hasattr(self, "desk"):
            return
        for _ in range(200):
            for consumer in self.names:
                while self.open[consumer]:
                    name = self.open[consumer].pop(0)
                    self.desk.transferred(name, name)
            if not any(self.waiting.values()):
                break
            self.step()
        assert not any(self.waiting.values()), "everybody starts"
        assert self.desk.cache.num_freeable_slots == self.size
        assert not self.desk.kept()


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)
