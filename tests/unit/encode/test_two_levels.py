"""The second level of an encode instance's cache: what the scheduler decides, what workers do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd_portable.encode.two_levels import TwoLevelCache
from tests.unit.builders import FakeRequest, request

SIZES = {"ant": 1, "bat": 2, "cat": 3, "dog": 4, "elk": 5, "fox": 6}
NBYTES = 10
"""Bytes of an embedding."""


def make(cache_size: int = 6, host_embeds: int = 9) -> TwoLevelCache:
    return TwoLevelCache(
        cache_size,
        host_embeds * NBYTES,
        lambda request, index: request.get_num_encoder_embeds(index) * NBYTES,
    )


class Worker:
    """Holds what a model runner would: the encoder cache, and copies in host memory."""

    def __init__(self, cache: TwoLevelCache) -> None:
        self.cache = cache
        self.device: set[str] = set()
        self.host: set[str] = set()

    def step(self, *requests: FakeRequest) -> list[str]:
        """Schedule and run a step that asks for the first item of each; return what is encoded."""
        encoded = []
        for each in requests:
            if self.cache.hold_entry(each, 0) and self.cache.check_and_update_cache(each, 0):
                continue
            if self.cache.can_allocate(each, 0, 100, 0):
                self.cache.allocate(each, 0)
                encoded.append(each.mm_features[0].identifier)
        freed, orders = self.cache.get_freed_mm_hashes(), self.cache.take_orders()
        assert set(orders.restored) <= self.host, "every copy that is restored is there"
        self.device |= set(orders.restored)
        self.host -= set(orders.dropped)
        self.device -= set(freed)
        self.device |= set(encoded)
        self.host |= set(orders.kept) & set(encoded)
        assert set(orders.kept) <= set(encoded)
        return encoded


def ask(name: str, number: int = 0) -> FakeRequest:
    return request(f"{name}-{number}", (name, SIZES[name]))


def test_evicted_item_is_restored_without_encoding() -> None:
    cache = make()
    worker = Worker(cache)
    first = ask("cat")
    assert worker.step(first) == ["cat"]
    cache.free(first)
    large = ask("fox")
    cache.free(large)
    assert worker.step(large) == ["fox"], "takes the whole cache"
    cache.free(large)
    assert "cat" not in cache
    again = ask("cat", 1)
    assert worker.step(again) == []
    assert worker.device == {"cat"}
    assert cache.holders("cat") == {"cat-1"}
    assert cache.num_freeable_slots == 3


def test_last_used_copy_stays_in_host_memory() -> None:
    cache = make(cache_size=6, host_embeds=6)
    worker = Worker(cache)
    for name in ("ant", "bat", "cat"):
        each = ask(name)
        worker.step(each)
        cache.free(each)
    used = ask("ant", 1)
    worker.step(used)
    cache.free(used)
    worker.step(ask("bat", 1), ask("dog"))
    assert worker.host == {"bat", "dog"}, "of six: ant was older than bat, and cat the oldest"


def test_evicted_item_of_the_same_step_is_not_restored() -> None:
    cache = make()
    worker = Worker(cache)
    for name in ("cat", "fox"):
        each = ask(name)
        worker.step(each)
        cache.free(each)
    back, next_one = ask("cat", 1), ask("elk")
    assert cache.hold_entry(back, 0)
    cache.free(back)
    assert cache.can_allocate(next_one, 0, 100, 0)
    cache.allocate(next_one, 0)
    assert "cat" not in cache
    assert cache.take_orders().restored == []


def test_copy_of_an_item_takes_all_host_memory() -> None:
    worker = Worker(make(host_embeds=SIZES["fox"]))
    for number in range(60):
        name = ("elk", "fox")[number % 2]
        worker.step(each := ask(name, number))
        assert worker.host == {name}
        worker.cache.free(each)


names = st.sampled_from(sorted(SIZES))


@given(
    cache_size=st.integers(6, 12),
    host_embeds=st.integers(0, 20),
    steps=st.lists(
        st.one_of(st.lists(names, min_size=1, max_size=4), st.just("reset")), max_size=30
    ),
)
def test_workers_have_what_the_scheduler_believes(
    cache_size: int, host_embeds: int, steps: list[list[str] | str]
) -> None:
    cache = make(cache_size, host_embeds)
    worker = Worker(cache)
    for number, step in enumerate(steps):
        if step == "reset":
            cache.reset()
            continue
        requests = [ask(name, 10 * number + place) for place, name in enumerate(step)]
        worker.step(*requests)
        entries = {mm_hash for mm_hash, item in cache.items.items() if item.is_here}
        assert worker.device == entries
        assert sum(SIZES[name] for name in worker.host) <= host_embeds
        for each in requests:
            cache.free(each)


def test_item_is_encoded_again_after_a_reset() -> None:
    cache = make()
    worker = Worker(cache)
    for number in range(2):
        each = ask("cat", number)
        assert worker.step(each) == ["cat"]
        cache.free(each)
        cache.reset()
    assert worker.step() == [] and (worker.device, worker.host) == (set(), set())


def test_lookup_restores_no_copy_into_promised_space() -> None:
    cache = make()
    worker = Worker(cache)
    first, large = ask("cat"), ask("fox")
    worker.step(first)
    cache.free(first)
    worker.step(large)
    cache.free(large)
    assert not cache.check_and_update_cache(ask("cat", 1), 0)
    worker.step()
    assert worker.device == {"fox"}


def test_room_that_is_added_is_free_for_what_was_refused() -> None:
    cache = make(cache_size=6)
    worker = Worker(cache)
    held = ask("fox")
    assert worker.step(held) == ["fox"]
    assert worker.step(ask("elk")) == []
    cache.grow(11)
    assert worker.step(ask("elk")) == ["elk"]
    assert cache.num_freeable_slots == cache.num_free_slots == 0
    cache.grow(3)
    assert cache.cache_size == 11


def test_item_twice_in_a_prompt_is_held_until_its_last_place() -> None:
    cache = make()
    twice = request("r", ("cat", SIZES["cat"]), ("dog", SIZES["dog"]), ("cat", SIZES["cat"]))
    cache.allocate(twice, 0)
    assert cache.get_cached_input_ids(twice) == {0, 2}
    cache.free_encoder_input(twice, 0)
    assert cache.holders("cat") == {"r"}
    cache.free_encoder_input(twice, 2)
    assert "cat" in cache and not cache.holders("cat")
