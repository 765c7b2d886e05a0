"""Encoder cache, preallocator and receive pool together against a model of who holds what.

The engine calls the cache as vLLM's scheduler does, and the receiver calls the preallocator, in any
order. Room is never negative, promised twice or lost; no slot is given out twice; what somebody
holds stays; requests get room in the order in which they came; at the end everything is back.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from epd_portable.wire.descriptors import SlotDescriptor
from tests.property.budget import budget, seeded
from tests.unit.builders import FakeRequest, request
from tests.unit.scheduling.desk import Desk

SIZES = {"ant": 1, "bee": 2, "cat": 3, "dog": 4, "elk": 5, "fox": 7}
CACHE_EMBEDS, POOL_BYTES = 9, 8
MAX_REQUESTS, MAX_STEPS_UNDER_WAY = 5, 2
EXAMPLES, STEPS = 100, 50

names = st.sampled_from(sorted(SIZES))
wishes = st.lists(names, min_size=1, max_size=3)


class Preallocation(RuleBasedStateMachine):
    kind = "sync"
    copies = False
    seen: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(self.kind, CACHE_EMBEDS, POOL_BYTES)
        self.cache, self.preallocator = self.desk.cache, self.desk.preallocator
        self.count = 0
        self.requests: dict[str, FakeRequest] = {}
        self.held: dict[str, set[int]] = {}
        self.order: list[str] = []
        """Items that requests await, in the order in which they must get room."""
        self.accepted: set[str] = set()
        self.slots: dict[str, SlotDescriptor] = {}
        """Of claims that have one."""
        self.resident: dict[str, SlotDescriptor] = {}
        self.writing: list[SlotDescriptor] = []
        """Lost by their claims; a producer may still write them."""
        self.under_way: deque[list[SlotDescriptor]] = deque()

    # -- requests ----------------------------------------------------------------------------------

    @initialize(first=wishes, second=wishes, third=wishes)
    def begin(self, first: list[str], second: list[str], third: list[str]) -> None:
        for wanted in (first, second, third):
            self.arrive(wanted, True)

    @precondition(lambda self: len(self.requests) < MAX_REQUESTS)
    @rule(wanted=wishes, by_transfer=st.sampled_from([True, True, False]))
    def arrive(self, wanted: list[str], by_transfer: bool) -> None:
        self.count += 1
        name = f"r{self.count}"
        self.requests[name] = request(name, *((item, SIZES[item]) for item in wanted))
        self.held[name] = set()
        for index, item in enumerate(wanted):
            if self.cache.check_and_update_cache(self.requests[name], index):
                self.held[name].add(index)
            elif by_transfer or self.preallocator.get(item) is not None:
                self.desk.claim(name, item, SIZES[item], index)
                self.accepted.discard(item)
                if item not in self.order:
                    self.order.append(item)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        gone = self.requests.pop(name)
        items = {feature.identifier for feature in gone.mm_features}
        for orphan in self.preallocator.withdraw(name, items):
            self.order.remove(orphan.mm_hash)
            self._lost(orphan.mm_hash)
        self.cache.free(gone)
        del self.held[name]

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def compute_past(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name in self.held if self.held[name])))
        index = data.draw(st.sampled_from(sorted(self.held[name])))
        self.cache.free_encoder_input(self.requests[name], index)
        self.held[name].discard(index)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), budget_left=st.integers(0, 10), others=st.integers(0, 2))
    def schedule(self, data: st.DataObject, budget_left: int, others: int) -> None:
        """Look for an item in the cache, and encode it here if that is allowed."""
        name = data.draw(st.sampled_from(sorted(self.requests)))
        engine_request = self.requests[name]
        index = data.draw(st.integers(0, len(engine_request.mm_features) - 1))
        item = engine_request.mm_features[index].identifier
        known = self.cache.get_cached_num_encoder_embeds(engine_request, index)
        if self.cache.check_and_update_cache(engine_request, index):
            assert known == SIZES[item]
        elif self.cache.can_allocate(engine_request, index, budget_left, others):
            assert item not in self.order and item not in self.accepted, "it is on its way"
            self.cache.allocate(engine_request, index)
            self.seen["encoded here"] += 1
        else:
            return
        self.held[name].add(index)

    # -- transfers ---------------------------------------------------------------------------------

    @precondition(lambda self: self.kind == "async" or not self.count % 4)
    @rule(item=names)
    def announce(self, item: str) -> None:
        if self.preallocator.knows(item):
            return
        claim = self.desk.accept(item, SIZES[item])
        if claim is None:
            assert self.preallocator.get(item) is None
            return
        assert claim.slot is not None
        assert not set(self.order) - set(self.slots), "a request waits for room"
        self.accepted.add(item)
        self.slots[item] = claim.slot
        self.seen["accepted"] += 1

    @rule()
    def reserve(self) -> None:
        waiting = [item for item in self.order if item not in self.slots]
        claims = self.preallocator.reserve()
        for claim in claims:
            assert claim.slot is not None
            self.slots[claim.mm_hash] = claim.slot
            self.seen["reserved"] += 1
        served = [claim.mm_hash for claim in claims]
        asked = [item for item in served if item in self.order]
        assert asked == served[: len(asked)] == waiting[: len(asked)], "first come, first served"
        left = waiting[len(asked) :]
        if left:
            assert served == asked, "what nobody asked for comes last"
            self.seen["waited"] += 1
            assert not self._fits(left[0]), "it could have been served"

    def _fits(self, item: str) -> bool:
        slot = self.desk.pool.take(SIZES[item])
        if slot is not None:
            self.desk.pool.give_back(slot)
        has_room = self.cache.can_preallocate(SIZES[item])
        return slot is not None and has_room and item not in self.resident

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self._land(data.draw(st.sampled_from(sorted(self.slots))))

    def _land(self, item: str) -> None:
        claim = self.preallocator.finalize(item)
        assert item not in self.resident, "its former slot would be lost"
        self.resident[item] = self.slots.pop(item)
        for name, index in claim.waiting:
            self.held[name].add(index)
        if item in self.order:
            self.order.remove(item)
        self.accepted.discard(item)
        self.seen["landed"] += 1

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def lose_the_slot(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(self.slots)))
        self.preallocator.reopen(item)
        self._lost(item)

    @precondition(lambda self: self.order or self.accepted)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted({*self.order, *self.accepted})))
        assert self.preallocator.cancel(item) is not None
        if item in self.order:
            self.order.remove(item)
        self.accepted.discard(item)
        self._lost(item)

    def _lost(self, item: str) -> None:
        slot = self.slots.pop(item, None)
        if slot is not None:
            self.writing.append(slot)

    @precondition(lambda self: self.writing)
    @rule()
    def writer_lets_go(self) -> None:
        self.desk.pool.give_back(self.writing.pop(0))

    @rule(rounds=st.integers(1, 3))
    def all_goes_well_for_a_while(self, rounds: int) -> None:
        """Items land, requests compute past them, and steps end."""
        for _ in range(rounds):
            self.reserve()
            for item in list(self.slots):
                self._land(item)
            for name, indices in self.held.items():
                for index in sorted(indices):
                    self.cache.free_encoder_input(self.requests[name], index)
                indices.clear()
            self._finish_steps()

    # -- the workers -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.under_way) < MAX_STEPS_UNDER_WAY)
    @rule()
    def begin_step(self) -> None:
        freed = self.cache.get_freed_mm_hashes()
        assert not any(item in self.cache for item in freed)
        unused = freed + (list(self.resident) if self.copies else [])
        retired = []
        for item in dict.fromkeys(unused):
            slot = self.preallocator.retire(item)
            assert slot == self.resident.pop(item, None)
            if slot is not None:
                retired.append(slot)
        self.under_way.append(retired)

    @precondition(lambda self: self.under_way)
    @rule()
    def end_step(self) -> None:
        self.preallocator.give_back(self.under_way.popleft())

    @rule(really=st.integers(0, 4).map(lambda number: number == 0))
    def reset(self, really: bool) -> None:
        if really:
            self.cache.reset()
            for indices in self.held.values():
                indices.clear()

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def room_adds_up(self) -> None:
        self.seen["steps"] += 1
        reserved = sum(SIZES[item] for item in self.slots)
        entries = [item for item in SIZES if item in self.cache]
        idle = [item for item in entries if not self.cache.holders(item)]
        free = CACHE_EMBEDS - reserved - sum(SIZES[item] for item in entries)
        assert self.cache.num_free_slots == free >= 0
        freeable = free + sum(SIZES[item] for item in idle)
        assert self.cache.num_freeable_slots == freeable <= CACHE_EMBEDS
        assert not set(entries) & set(self.slots)

    @invariant()
    def every_slot_that_is_out_has_one_owner(self) -> None:
        owned = [*self.slots.values(), *self.resident.values(), *self.writing]
        owned += [slot for step in self.under_way for slot in step]
        taken = sorted((slot.offset, slot.offset + slot.nbytes) for slot in owned)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))
        assert not taken or taken[-1][1] <= POOL_BYTES
        assert self.desk.pool.free_bytes == POOL_BYTES - sum(slot.nbytes for slot in owned)

    @invariant()
    def what_is_held_is_here(self) -> None:
        for name, indices in self.held.items():
            engine_request = self.requests[name]
            assert self.cache.get_cached_input_ids(engine_request) == indices
            for index in indices:
                assert name in self.cache.holders(engine_request.mm_features[index].identifier)

    @invariant()
    def the_claim_that_blocks_is_the_first_that_waits(self) -> None:
        blocked = self.preallocator.blocked
        if blocked is not None:
            assert blocked.mm_hash == next(i for i in self.order if i not in self.slots)

    def teardown(self) -> None:
        """Let everybody have what they wait for, and go: whoever waits is served."""
        while self.writing:
            self.writer_lets_go()
        for _ in range(3 * len(self.order) + 3):
            self._finish_steps()
            self.reserve()
            for item in list(self.slots):
                self.preallocator.finalize(item)
                self.resident[item] = self.slots.pop(item)
            self.order = [item for item in self.order if self.preallocator.get(item)]
            for engine_request in self.requests.values():
                self.cache.free(engine_request)
        assert not self.order, "somebody was never served"
        self.cache.reset()
        self._finish_steps()
        assert self.desk.pool.free_bytes == POOL_BYTES
        assert self.cache.num_free_slots == self.cache.num_freeable_slots == CACHE_EMBEDS
        assert not any(self.preallocator.knows(item) for item in SIZES)

    def _finish_steps(self) -> None:
        while self.under_way:
            self.end_step()
        self.begin_step()
        self.end_step()


@pytest.mark.parametrize(
    ("number", "kind", "copies"),
    [(11, "sync", False), (12, "sync", True), (13, "async", False), (14, "async", True)],
)
def test_whatever_is_asked_room_is_never_lost_given_twice_or_given_out_of_turn(
    number: int, kind: str, copies: bool
) -> None:
    seen: Counter[str] = Counter()
    machine = type("Machine", (Preallocation,), {"kind": kind, "copies": copies, "seen": seen})
    run_state_machine_as_test(seeded(number, machine), settings=budget(EXAMPLES, steps=STEPS))
    assert seen["steps"] > EXAMPLES * STEPS / 2, seen
    assert {"reserved", "waited", "landed", "encoded here"} <= set(+seen), seen
    assert bool(seen["accepted"]) == (kind == "async"), seen
