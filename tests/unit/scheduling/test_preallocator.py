from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_portable.connector.pool import ReceivePool
from epd_portable.scheduling.encoder_cache import EncoderCacheManager
from epd_portable.scheduling.preallocator import SyncEncoderCachePreallocator
from epd_portable.wire.descriptors import SlotDescriptor
from tests.unit.builders import FakeRequest, request

Preallocator = SyncEncoderCachePreallocator[SlotDescriptor]


class Desk:
    """A preallocator over a cache of ten embeddings and a pool of ten bytes."""

    def __init__(self, cache_embeds: int = 10, pool_bytes: int = 10) -> None:
        self.cache = EncoderCacheManager(cache_embeds)
        self.pool = ReceivePool("pool", pool_bytes, 1)
        self.preallocator = Preallocator(self.cache, self.pool)

    def claim(self, request_id: str, mm_hash: str, size: int, input_id: int = 0) -> None:
        self.preallocator.claim(request_id, input_id, mm_hash=mm_hash, num_embeds=size, nbytes=size)

    def reserve(self) -> list[str]:
        return [claim.mm_hash for claim in self.preallocator.reserve()]

    def step(self) -> None:
        """Tell the workers what to forget, and end that step."""
        slots = [self.preallocator.retire(gone) for gone in self.cache.get_freed_mm_hashes()]
        self.preallocator.give_back(taken for taken in slots if taken is not None)

    def deliver(self, mm_hash: str, request_id: str) -> FakeRequest:
        """Land a claimed item; return the request that holds it."""
        size = self.preallocator.finalize(mm_hash).num_embeds
        return request(request_id, (mm_hash, size))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_claims_are_reserved_in_order_until_the_first_that_does_not_fit(desk: Desk) -> None:
    for name, size in (("a", 6), ("b", 6), ("c", 1)):
        desk.claim(name, name, size)
    assert desk.reserve() == ["a"]
    assert desk.reserve() == [], "c would fit, but b was first"


@pytest.mark.parametrize(("cache_embeds", "pool_bytes"), [(6, 100), (100, 6)])
def test_whichever_is_short_cache_or_pool_stops_the_queue(
    cache_embeds: int, pool_bytes: int
) -> None:
    desk = Desk(cache_embeds, pool_bytes)
    desk.claim("a", "a", 4)
    desk.claim("b", "b", 4)
    desk.claim("c", "c", 2)
    assert desk.reserve() == ["a"]
    desk.preallocator.withdraw("a", ["a"])
    assert desk.cache.num_free_slots == cache_embeds


def test_an_item_that_several_requests_await_is_reserved_once_at_the_first_place(
    desk: Desk,
) -> None:
    desk.claim("r", "shared", 6)
    desk.claim("r", "big", 6, 1)
    desk.claim("s", "shared", 6)
    assert desk.reserve() == ["shared"]
    claim = desk.preallocator.finalize("shared")
    assert claim.waiting == {("r", 0), ("s", 0)}
    desk.cache.free(request("r", ("shared", 6)))
    assert desk.cache.evict_idle({"shared"}) is None, "s holds it"


def test_two_requests_never_block_each_other_with_half_of_what_each_needs(desk: Desk) -> None:
    desk.claim("r", "r1", 5, 0)
    desk.claim("r", "r2", 5, 1)
    desk.claim("s", "s1", 5, 0)
    desk.claim("s", "s2", 5, 1)
    assert desk.reserve() == ["r1", "r2"]
    for name in ("r1", "r2"):
        desk.preallocator.finalize(name)
    desk.cache.free(request("r", ("r1", 5), ("r2", 5)))
    for _ in range(4):
        desk.reserve()
        desk.step()
    assert desk.preallocator.get("s1") is not None
    assert all(desk.preallocator.get(name).slot is not None for name in ("s1", "s2"))  # type: ignore[union-attr]


def test_an_idle_resident_is_evicted_when_slots_are_short_and_its_slot_is_used_a_step_later() -> (
    None
):
    desk = Desk(cache_embeds=100, pool_bytes=10)
    desk.claim("r", "old", 8)
    desk.reserve()
    held = desk.deliver("old", "r")
    desk.claim("s", "new", 8)
    assert desk.reserve() == []
    desk.step()
    assert "old" in desk.cache, "held, so it stays"
    desk.cache.free(held)
    assert desk.reserve() == []
    assert "old" not in desk.cache
    assert desk.reserve() == [], "the workers have not forgotten it yet"
    desk.step()
    assert desk.reserve() == ["new"]


def test_no_more_is_evicted_while_slots_are_on_their_way_back() -> None:
    desk = Desk(cache_embeds=100, pool_bytes=10)
    for name in ("one", "two"):
        desk.claim(name, name, 5)
        desk.reserve()
        desk.cache.free(desk.deliver(name, name))
    desk.claim("s", "new", 5)
    desk.reserve()
    slots = [desk.preallocator.retire(gone) for gone in desk.cache.get_freed_mm_hashes()]
    desk.reserve()
    assert "two" in desk.cache
    desk.preallocator.give_back(taken for taken in slots if taken is not None)
    assert desk.reserve() == ["new"]
    assert "two" in desk.cache


def test_entries_that_occupy_no_slot_are_not_evicted_for_slots() -> None:
    desk = Desk(cache_embeds=100, pool_bytes=10)
    local = request("r", ("local", 5))
    assert desk.cache.can_allocate(local, 0, 100, 0)
    desk.cache.allocate(local, 0)
    desk.cache.free(local)
    desk.claim("s", "a", 8)
    desk.reserve()
    desk.claim("t", "b", 8)
    desk.reserve()
    assert "local" in desk.cache


def test_a_lost_slot_puts_the_claim_back_at_its_own_place(desk: Desk) -> None:
    desk.claim("r", "a", 5)
    desk.claim("s", "b", 5)
    desk.claim("t", "c", 5)
    assert desk.reserve() == ["a", "b"]
    lost = desk.preallocator.get("a")
    assert lost is not None and lost.slot is not None
    taken = lost.slot
    desk.preallocator.reopen("a")
    desk.preallocator.reopen("a")
    assert desk.cache.num_free_slots == 5
    assert desk.reserve() == [], "its slot is not back yet, and c must wait"
    desk.pool.give_back(taken)
    assert desk.reserve() == ["a"]


def test_withdrawing_returns_a_claim_only_when_its_last_request_leaves(desk: Desk) -> None:
    desk.claim("r", "a", 5, 0)
    desk.claim("r", "a", 5, 1)
    desk.claim("s", "a", 5, 0)
    desk.reserve()
    assert desk.preallocator.withdraw("r", ["a", "unknown"]) == []
    (orphan,) = desk.preallocator.withdraw("s", ["a"])
    assert orphan.slot is not None
    assert desk.preallocator.get("a") is None
    assert desk.cache.num_free_slots == 10
    assert desk.preallocator.withdraw("s", ["a"]) == []


def test_cancelling_ends_the_wait_and_allows_local_encoding(desk: Desk) -> None:
    desk.claim("r", "a", 5)
    desk.reserve()
    local = request("r", ("a", 5))
    assert not desk.cache.can_allocate(local, 0, 100, 0)
    assert desk.preallocator.cancel("a") is not None
    assert desk.preallocator.cancel("a") is None
    assert desk.cache.can_allocate(local, 0, 100, 0)


def test_what_could_never_fit_is_known_at_once(desk: Desk) -> None:
    assert desk.preallocator.fits_at_all(10, 10)
    assert not desk.preallocator.fits_at_all(11, 1)
    assert not desk.preallocator.fits_at_all(1, 11)


def test_an_item_that_was_not_reserved_cannot_be_finalized(desk: Desk) -> None:
    with pytest.raises(KeyError):
        desk.preallocator.finalize("a")
    desk.claim("r", "a", 5)
    with pytest.raises(KeyError):
        desk.preallocator.finalize("a")


class QueueAgainstModel(RuleBasedStateMachine):
    """Requests with items of their own come, get them in order, and go."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(cache_embeds=8, pool_bytes=9)
        self.queue: list[str] = []
        self.reserved: list[str] = []
        self.landed: list[str] = []
        self.sizes: dict[str, int] = {}

    def engine_request(self, name: str) -> FakeRequest:
        return request(name, (name, self.sizes[name]))

    @rule(size=st.integers(1, 8))
    def claim(self, size: int) -> None:
        name = f"item-{len(self.sizes)}"
        self.sizes[name] = size
        self.desk.claim(name, name, size)
        self.queue.append(name)

    @rule()
    def reserve(self) -> None:
        for name in self.desk.reserve():
            assert name == self.queue.pop(0), "not in the order of arrival"
            self.reserved.append(name)

    @rule()
    def step(self) -> None:
        self.desk.step()

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.reserved))
        self.reserved.remove(name)
        self.desk.deliver(name, name)
        self.landed.append(name)

    @precondition(lambda self: self.landed)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.landed))
        self.landed.remove(name)
        self.desk.cache.free(self.engine_request(name))

    @precondition(lambda self: self.queue or self.reserved)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.queue + self.reserved))
        (self.queue if name in self.queue else self.reserved).remove(name)
        (orphan,) = self.desk.preallocator.withdraw(name, [name])
        if orphan.slot is not None:
            self.desk.pool.give_back(orphan.slot)

    @invariant()
    def room_is_never_promised_twice(self) -> None:
        promised = sum(self.sizes[name] for name in self.reserved + self.landed)
        assert promised <= self.desk.cache.cache_size
        assert promised <= self.desk.pool.capacity_bytes
        assert self.desk.cache.num_freeable_slots == self.desk.cache.cache_size - promised

    def teardown(self) -> None:
        """Let everybody go, in order: the whole queue is served, all room comes back."""
        for _ in range(4 * len(self.sizes) + 4):
            self.reserve()
            for name in self.reserved:
                self.desk.cache.free(self.desk.deliver(name, name))
            self.reserved.clear()
            for name in self.landed:
                self.desk.cache.free(self.engine_request(name))
            self.landed.clear()
            self.step()
        assert not self.queue
        self.desk.cache.reset()
        self.step()
        assert self.desk.pool.free_bytes == self.desk.pool.capacity_bytes
        assert self.desk.cache.num_free_slots == self.desk.cache.cache_size


TestQueueAgainstModel = QueueAgainstModel.TestCase
TestQueueAgainstModel.settings = settings(max_examples=40, deadline=None)
