"""The encoder cache and the receive pool of a prefill+decode engine against a model of owners.

The engine calls the cache as vLLM's scheduler does; transfers come, fail and land, in any order.
Room is never negative, promised twice or lost; no slot is given out twice; what somebody holds
stays; requests get room in their order, local encodes among it; everybody is served in the end, and
then everything is back.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

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

from epd_portable.items import room
from epd_portable.items.slots import Slot, SlotState
from epd_portable.items.table import COMPUTED, UNDER_WAY, Claim, Item, ItemRequest, State
from tests.property.budget import budget, seeded
from tests.unit.items.cache_desk import Desk, tensor

SIZES = {"ant": 1, "bee": 2, "cat": 3, "dog": 4, "elk": 5, "fox": 7}
CACHE_EMBEDS, POOL_BYTES = 9, 8
MAX_REQUESTS, MAX_STEPS_UNDER_WAY = 5, 2
EXAMPLES, STEPS = 75, 50

seldom = st.integers(0, 4).map(lambda number: number == 0)


class Wish(NamedTuple):
    """A place of an item in a prompt.

    ``moved`` by a transfer of the request's own, ``bare`` so, too, and cannot be encoded here;
    ``local`` is encoded here unless a transfer of another request brings it.
    """

    name: str
    kind: str
    size: int


animals = st.builds(
    lambda name, kind, another: Wish(name, kind, SIZES[name] + another),
    st.sampled_from(sorted(SIZES)),
    st.sampled_from(["moved", "moved", "bare", "local"]),
    st.sampled_from([0, 0, 1]),
)
prompts = st.lists(animals, min_size=1, max_size=3)


class EncoderCacheModel(RuleBasedStateMachine):
    copies = False
    background = False
    seen: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(CACHE_EMBEDS, POOL_BYTES, background=self.background)
        self.cache = self.desk.cache
        self.count = 0
        self.prompts: dict[str, dict[int, Wish]] = {}
        self.resident: dict[str, Slot] = {}
        """Slots of items that have landed, until the workers have forgotten them."""
        self.under_way: deque[tuple[int, list[Slot]]] = deque()

    def who(self, name: str) -> ItemRequest:
        return self.desk.who(name)

    def claims(self) -> Iterator[Claim]:
        for name in self.prompts:
            yield from self.who(name).claims.values()

    def waiting(self) -> list[Claim]:
        """Return the claims that are not served, in the order in which they must be."""
        waiting = [claim for claim in self.claims() if claim.is_pending]
        return sorted(waiting, key=room.position)

    def items(self, *states: State) -> list[str]:
        return sorted(name for name, item in self.cache.items.items() if item.state in states)

    # -- requests ----------------------------------------------------------------------------------

    @initialize(first=prompts, second=prompts, third=prompts)
    def begin(self, first: list[Wish], second: list[Wish], third: list[Wish]) -> None:
        for wishes in (first, second, third):
            self.arrive(wishes)

    @precondition(lambda self: len(self.prompts) < MAX_REQUESTS)
    @rule(wishes=prompts)
    def arrive(self, wishes: list[Wish]) -> None:
        self.count += 1
        name = f"r{self.count}"
        self.prompts[name] = {}
        self.who(name)
        for place, wish in enumerate(wishes):
            others = [other for other in self.prompts[name].values() if other.name == wish.name]
            if not self._claim(name, place, others[0] if others else wish, again=bool(others)):
                self._leave(name)  # It is refused.
                return

    def _claim(self, name: str, place: int, wish: Wish, *, again: bool = False) -> bool:
        known = self.cache.items.get(wish.name)
        if known is not None and known.tensor != tensor(wish.size):
            if known.holders or known.pending or known.state is State.ENCODING:
                assert self.cache.open(wish.name, tensor(wish.size)) is None
                return False
            self.seen["replaced"] += 1
        self.prompts[name][place] = wish
        by_transfer = wish.kind != "local" and not again
        metadata_only = wish.kind == "bare"
        self.desk.claim(
            name, wish.name, wish.size, place, by_transfer=by_transfer, metadata_only=metadata_only
        )
        return True

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self._leave(data.draw(st.sampled_from(sorted(self.prompts))))

    def _leave(self, name: str) -> None:
        engine_request = self.desk.request(name) if self.prompts[name] else None
        self.desk.leave(name)
        if engine_request is not None:
            self.cache.free(engine_request)
            assert not self.cache.get_cached_input_ids(engine_request)
        del self.prompts[name]
        assert name not in self.cache.incomplete

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        made = self.who(data.draw(st.sampled_from(sorted(self.prompts))))
        if self.desk.may_start(made.request_id):
            assert not made.is_pending or self.waiting()[0].request is made
            self.desk.run(made.request_id)
            self.seen["started"] += 1
        else:
            assert made.is_pending

    @precondition(lambda self: any(self.who(name).running for name in self.prompts))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Preempt a request: it needs again what it has passed."""
        running = [name for name in self.prompts if self.who(name).running]
        name = data.draw(st.sampled_from(sorted(running)))
        if not self.prompts[name]:
            return
        self.desk.preempt(name)
        made = self.who(name)
        assert not made.running
        names = {wish.name for wish in self.prompts[name].values()}
        assert made.claims.keys() | made.lost.keys() == names

    @precondition(lambda self: any(claim.is_served for claim in self.claims()))
    @rule(data=st.data())
    def compute_past(self, data: st.DataObject) -> None:
        held = [
            (name, min(self.cache.get_cached_input_ids(self.desk.request(name))))
            for name in sorted(self.prompts)
            if self.prompts[name] and self.cache.get_cached_input_ids(self.desk.request(name))
        ]
        if held:
            self.desk.compute_past(*data.draw(st.sampled_from(held)))

    @precondition(lambda self: any(self.prompts.values()))
    @rule(data=st.data(), budget_left=st.integers(0, 10), others=st.integers(0, 2))
    def schedule(self, data: st.DataObject, budget_left: int, others: int) -> None:
        """Look for an item in the cache, and encode it here if that is allowed."""
        name = data.draw(st.sampled_from(sorted(n for n in self.prompts if self.prompts[n])))
        engine_request = self.desk.request(name)
        place = data.draw(st.sampled_from(sorted(self.prompts[name])))
        mm_hash = self.prompts[name][place].name
        claim = self.who(name).claims.get(mm_hash)
        known = self.cache.get_cached_num_encoder_embeds(engine_request, place)
        here = self.cache.check_and_update_cache(engine_request, place)
        may_encode = self.cache.can_allocate(engine_request, place, budget_left, others)
        if claim is None:
            assert not here and not may_encode
        elif here:
            assert known == claim.item.num_embeds
            assert claim.is_served and not may_encode
        elif may_encode:
            assert (
                claim.is_served and not claim.metadata_only and claim.item.num_embeds <= budget_left
            )
            self.cache.allocate(engine_request, place)
            self.seen["encoded here"] += 1

    @precondition(lambda self: any(self.who(name).lost for name in self.prompts))
    @rule()
    def fail_who_lost_an_item(self) -> None:
        self.seen["lost"] += 1
        for name in [name for name in self.prompts if self.who(name).lost]:
            bare = {wish.name for wish in self.prompts[name].values() if wish.kind == "bare"}
            for mm_hash, reason in self.who(name).lost.items():
                assert mm_hash in bare or "another item of that name" in reason
            self._leave(name)

    # -- transfers ---------------------------------------------------------------------------------

    @rule()
    def reserve(self) -> None:
        before = self.waiting()
        given = self.desk.reserve()
        served = [not claim.is_pending for claim in before]
        assert served == sorted(served, reverse=True), "first come, first served"
        self.seen["reserved"] += len(given)
        left = self.waiting()
        if left:
            self.seen["waited"] += 1
            assert not self._could_be_served(left[0])
            if not self._space_comes_back(left[0]):
                assert not any(self._could_be_preempted(claim, left[0]) for claim in self.claims())

    def _could_be_served(self, claim: Claim) -> bool:
        item = claim.item
        if item.state is not State.WAITING:
            return item.state is not State.LOCAL or not claim.metadata_only
        used = (each for each in self.cache.items.values() if each.state is not State.WAITING)
        kept = (each for each in used if each.holders or not each.is_here)
        has_room = CACHE_EMBEDS - sum(each.num_embeds for each in kept) >= item.num_embeds
        if not item.transfers:
            return claim.metadata_only or has_room
        slot = self.desk.pool.reserve(item.num_embeds)
        if slot is not None:
            self.desk.pool.free(slot)
        return slot is not None and has_room and item.mm_hash not in self.resident

    def _could_be_preempted(self, claim: Claim, first: Claim) -> bool:
        under_way = claim.item.state in (State.GRANTED, State.ENCODING)
        return claim.is_served and not under_way and room.position(claim) > room.position(first)

    def _space_comes_back(self, first: Claim) -> bool:
        """Return whether a slot is on its way, or a request holds all items and will compute."""
        item = first.item
        if item.transfers and self.cache.num_freeable_slots >= item.num_embeds:
            gone = any(not self._is_entry(name) for name in self.resident)
            if gone or self.desk.pool.retiring:
                return True
        return any(
            any(claim.is_served for claim in made.claims.values())
            and not any(claim.is_pending for claim in made.claims.values())
            and (made.running or not first.request.running)
            for made in map(self.who, self.prompts)
        )

    def _is_entry(self, mm_hash: str) -> bool:
        return mm_hash in self.cache

    @precondition(lambda self: self.items(State.RESERVED))
    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        self.desk.grant(data.draw(st.sampled_from(self.items(State.RESERVED))))

    @precondition(lambda self: self.items(State.RESERVED, State.GRANTED))
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self._land(data.draw(st.sampled_from(self.items(State.RESERVED, State.GRANTED))))

    def _land(self, mm_hash: str) -> None:
        slot = self.cache.items[mm_hash].slot
        assert slot is not None
        assert mm_hash not in self.resident, "its former slot would be lost"
        self.desk.deliver(mm_hash)
        self.resident[mm_hash] = slot
        self.seen["landed"] += 1

    @precondition(lambda self: self.items(State.ENCODING))
    @rule(data=st.data(), well=st.booleans())
    def end_in_the_background(self, data: st.DataObject, well: bool) -> None:
        mm_hash = data.draw(st.sampled_from(self.items(State.ENCODING)))
        if well:
            self.cache.encoded(mm_hash)
            self.seen["encoded here"] += 1
        else:
            self.cache.not_encoded(mm_hash)
            self.seen["not encoded"] += 1

    @precondition(lambda self: self.items(State.GRANTED))
    @rule(data=st.data())
    def lose_the_slot(self, data: st.DataObject) -> None:
        self.desk.lose_slot(data.draw(st.sampled_from(self.items(State.GRANTED))))

    @precondition(lambda self: any(item.transfers for item in self.cache.items.values()))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """All transfers of an item come to nothing."""
        names = [name for name, item in self.cache.items.items() if item.transfers]
        self._give_up(self.cache.items[data.draw(st.sampled_from(sorted(names)))])

    def _give_up(self, item: Item) -> None:
        self.desk.lose_transfers(item.mm_hash, "no encoder delivers it")

    @precondition(lambda self: self.desk.writing)
    @rule()
    def writers_let_go(self) -> None:
        self.desk.release()

    @rule(rounds=st.integers(1, 3))
    def all_goes_well_for_a_while(self, rounds: int) -> None:
        """Items land or are encoded, requests that may start compute past them, and steps end."""
        for _ in range(rounds):
            self._finish_steps()
            self.reserve()
            for mm_hash in self.items(State.RESERVED, State.GRANTED):
                self._land(mm_hash)
            for mm_hash in self.items(State.ENCODING):
                self.cache.encoded(mm_hash)
            for name in [name for name in self.prompts if self.prompts[name]]:
                self._compute(name)

    def _compute(self, name: str) -> None:
        """Compute what can be of a request, item by item."""
        made = self.who(name)
        if not made.running:
            if not self.desk.may_start(name):
                return
            self.desk.run(name)
        for place, wish in sorted(self.prompts[name].items()):
            claim = made.claims.get(wish.name)
            if claim is None or place < claim.place:
                continue
            if self.desk.may_encode(name, place):
                self.desk.encode(name, place)
            if not self.cache.check_and_update_cache(self.desk.request(name), place):
                return
            self.desk.compute_past(name, place)
        assert not made.claims

    # -- the workers -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.under_way) < MAX_STEPS_UNDER_WAY)
    @rule()
    def begin_step(self) -> None:
        freed = self.cache.get_freed_mm_hashes()
        assert not any(mm_hash in self.cache for mm_hash in freed)
        placed = self.items(State.LANDED)
        for mm_hash in placed:
            self.cache.placed(self.cache.items[mm_hash])
        before = set(self.resident)
        for mm_hash in freed:
            self.cache.retire(mm_hash)
        step = self.desk.begin_step(*(placed if self.copies else []))
        gone = [self.resident.pop(each) for each in before - self.desk.pool.resident.keys()]
        assert all(each.state is SlotState.RETIRING for each in gone)
        self.under_way.append((step, gone))

    @precondition(lambda self: self.under_way)
    @rule()
    def end_step(self) -> None:
        step, gone = self.under_way.popleft()
        assert all(each in self.desk.pool.retiring for each in gone)
        self.cache.step_ended(step)
        assert not any(each in self.desk.pool.retiring for each in gone)

    @rule(really=seldom)
    def reset(self, really: bool) -> None:
        if really:
            self.cache.reset()
            assert not any(item.is_here for item in self.cache.items.values())

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def room_adds_up(self) -> None:
        self.seen["steps"] += 1
        items = self.cache.items.values()
        used = sum(item.num_embeds for item in items if item.state is not State.WAITING)
        idle = sum(item.num_embeds for item in items if item.is_here and not item.holders)
        free = CACHE_EMBEDS - used
        assert self.cache.num_free_slots == free >= 0
        assert self.cache.num_freeable_slots == free + idle

    @invariant()
    def every_slot_has_one_state_and_one_place(self) -> None:
        pool = self.desk.pool
        for item in self.cache.items.values():
            assert (item.slot is not None) == (item.state in (State.RESERVED, State.GRANTED))
            if item.slot is not None:
                leased = item.state is State.GRANTED
                assert item.slot.state is (SlotState.LEASED if leased else SlotState.RESERVED)
        assert pool.resident == self.resident
        assert all(each.state is SlotState.QUARANTINED for each in self.desk.writing)
        owned = [item.slot for item in self.cache.items.values() if item.slot is not None]
        owned += [*self.resident.values(), *self.desk.writing, *pool.retiring]
        assert {*map(id, owned)} == {*map(id, pool.slots.values())}
        assert len(owned) == len(pool.slots)
        taken = sorted(
            (each.descriptor.offset, each.descriptor.offset + each.size) for each in owned
        )
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))
        assert not taken or taken[-1][1] <= POOL_BYTES
        assert pool.free_bytes == POOL_BYTES - sum(each.size for each in owned)

    @invariant()
    def a_request_holds_a_run_of_its_items_from_the_one_that_it_needs_next(self) -> None:
        """But for an item that it has computed once, and needs again."""
        for name in self.prompts:
            claims = self.who(name).claims.values()
            gap = min((each.place for each in claims if each.is_pending), default=COMPUTED)
            for claim in claims:
                if claim.is_served and gap < claim.place < COMPUTED:
                    assert claim.place > min(claim.inputs)

    @invariant()
    def what_is_held_stays_and_what_nobody_wants_goes(self) -> None:
        for name in self.prompts:
            made = self.who(name)
            here: set[int] = set()
            for mm_hash, claim in made.claims.items():
                item = self.cache.items[mm_hash]
                assert claim.item is item
                assert (name in item.holders) == claim.is_served == (name not in item.pending)
                assert not claim.is_served or item.state is not State.WAITING
                if claim.is_served and item.is_here:
                    here |= {
                        n for n, at in claim.inputs.items() if at.end > made.num_computed_tokens
                    }
            if self.prompts[name]:
                assert self.cache.get_cached_input_ids(self.desk.request(name)) == here
        names = set(self.prompts)
        for item in self.cache.items.values():
            assert item.holders | set(item.pending) <= names
            assert self._is_wanted(item) or item.is_here

    def _is_wanted(self, item: Item) -> bool:
        if item.state is State.LOCAL:
            return bool(item.holders)
        if item.state is State.ENCODING:
            return True  # Nobody may want it any more, but it cannot be stopped.
        return bool(item.holders or item.pending)

    @invariant()
    def first_pending_claim_waits_for_what_will_end(self) -> None:
        """The proof of `epd_portable.items.room`, by its three cases."""
        first = self.cache.pending.first
        if first is None or not self.cache.is_at_rest:
            return
        self.seen["claims that wait"] += 1
        holding = self.cache.with_space.values()
        computes = any(room.is_about_to_compute(each, first.request) for each in holding)
        slots = self.desk.writing or self.cache.slot_returns
        ends = slots or any(each.state in UNDER_WAY for each in self.cache.items.values())
        alone = all(each is first.request for each in holding)
        may_run = first.request.running or room.may_start(self.cache, first.request)
        assert computes or ends or (alone and may_run)

    @invariant()
    def whether_somebody_waits_is_known(self) -> None:
        assert (self.cache.pending.first is not None) == bool(self.waiting())

    def teardown(self) -> None:
        """Let everybody have what they wait for, and go: whoever waits is served."""
        self.desk.release()
        for _ in range(3 * sum(map(len, self.prompts.values())) + 3):
            self.all_goes_well_for_a_while(1)
            for name in list(self.prompts):
                if self.who(name).lost or not self.who(name).claims:
                    self._leave(name)
        assert not self.prompts, "somebody was never served"
        for item in list(self.cache.items.values()):
            assert item.is_here
            self._give_up(item)  # at its deadline
        self._finish_steps()
        self.cache.reset()
        self._finish_steps()
        assert self.desk.pool.free_bytes == POOL_BYTES
        assert self.cache.num_free_slots == self.cache.num_freeable_slots == CACHE_EMBEDS
        assert not self.cache.items
        assert not self.cache.incomplete

    def _finish_steps(self) -> None:
        while self.under_way:
            self.end_step()
        self.begin_step()
        self.end_step()


@pytest.mark.parametrize(
    ("number", "copies", "background"), [(11, False, False), (12, True, False), (16, False, True)]
)
def test_space_is_never_lost_granted_twice_or_out_of_order(
    number: int, copies: bool, background: bool
) -> None:
    seen: Counter[str] = Counter()
    how = {"copies": copies, "background": background, "seen": seen}
    machine = type("Machine", (EncoderCacheModel,), how)
    run_state_machine_as_test(seeded(number, machine), settings=budget(EXAMPLES, steps=STEPS))
    assert seen["steps"] > EXAMPLES * STEPS / 2, seen
    usual = {"reserved", "waited", "landed", "encoded here", "started", "lost", "replaced"}
    usual |= {"claims that wait"}
    assert usual <= set(+seen), seen
    assert bool(seen["not encoded"]) == background, seen
