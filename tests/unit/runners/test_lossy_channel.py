"""Encode sides and a PD side joined by a channel that loses, repeats and reorders.

Whatever happens: bytes are never written where they are not expected, a slot is never somebody
else's while it may be written, every transfer ends within its deadline, and at the end every slot
and all room is back.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_portable.connector.consumer import LEASE_MARGIN_S
from epd_portable.runners.placer import Placement
from epd_portable.wire.messages import AnyMessage, EncodeFailed
from tests.unit.runners.harness import LEASE_S, TIMEOUT_S, EncodeSide, Item, PrefillSide

SIZES = {"cat": 1, "dog": 2, "emu": 3, "fox": 4}
MAX_REQUESTS = 6


class LossyChannel(RuleBasedStateMachine):
    path = "shm"
    copies = False

    def __init__(self) -> None:
        super().__init__()
        self.pd = PrefillSide(pool_tokens=5, cache_tokens=7, path=self.path, copies=self.copies)
        self.encoders = {name: EncodeSide(name, self.pd.clock) for name in ("a", "b")}
        self.lives = dict.fromkeys(self.encoders, 1)
        self.to_pd: list[tuple[bytes, AnyMessage]] = []
        self.to_encode: list[tuple[bytes, AnyMessage]] = []
        self.content: dict[int, str] = {}
        self.orders: dict[str, Item] = {}
        self.ordered: set[tuple[str, str]] = set()
        self.arrivals: dict[str, float] = {}
        self.count = 0

    # -- what users, routers and encoders do -----------------------------------------------------

    @precondition(lambda self: len(self.pd.requests) < MAX_REQUESTS)
    @rule(
        names=st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=3),
        encoder=st.sampled_from("ab"),
        ready=st.sampled_from([True, True, False]),
        order_first=st.booleans(),
    )
    def arrive(self, names: list[str], encoder: str, ready: bool, order_first: bool) -> None:
        self.count += 1
        request_id = f"r{self.count}"
        items = [Item(name, SIZES[name], f"{request_id}-{name}") for name in names]
        for item in items:
            self.orders[item.transfer_id] = item
        if order_first:
            self._order(encoder, items, ready)
        self.pd.arrive(request_id, *items)
        self.arrivals[request_id] = self.pd.clock.now
        if not order_first:
            self._order(encoder, items, ready)

    def _order(self, encoder: str, items: list[Item], ready: bool) -> None:
        for item in items:
            if (encoder, item.transfer_id) not in self.ordered:
                self.ordered.add((encoder, item.transfer_id))
                self.encoders[encoder].submit(item, ready=ready)

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), encoder=st.sampled_from("ab"))
    def another_encoder_is_asked(self, data: st.DataObject, encoder: str) -> None:
        transfer_id = data.draw(st.sampled_from(sorted(self.orders)))
        self._order(encoder, [self.orders[transfer_id]], True)

    @rule(encoder=st.sampled_from("ab"), name=st.sampled_from(sorted(SIZES)))
    def output_ready(self, encoder: str, name: str) -> None:
        self.encoders[encoder].session.output_ready(name)

    @precondition(lambda self: self.pd.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.pd.requests)))
        self.pd.finish(request_id)
        del self.arrivals[request_id]

    @precondition(lambda self: self.pd.requests)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """Let a request take what it may: an item in the cache, or one that it encodes here."""
        request_id = data.draw(st.sampled_from(sorted(self.pd.requests)))
        for item in self.pd.items[request_id]:
            if not self.pd.receiver.may_schedule(request_id, item.begin):
                break
            if not self.pd.encode_here(request_id, item.input_id):
                break
            self.pd.cache.free_encoder_input(self.pd.requests[request_id], item.input_id)

    @precondition(lambda self: self.orders)
    @rule(data=st.data())
    def encode_failed(self, data: st.DataObject) -> None:
        transfer_id = data.draw(st.sampled_from(sorted(self.orders)))
        self.pd.mailbox.inbox.append((b"router", EncodeFailed(transfer_id=transfer_id, reason="")))

    @precondition(lambda self: self.lives["a"] < 3)
    @rule(encoder=st.just("a"))
    def restart(self, encoder: str) -> None:
        self.pd.mailbox.gone.add(self.encoders[encoder].session_id)
        self.lives[encoder] += 1
        self.encoders[encoder] = EncodeSide(encoder, self.pd.clock, self.lives[encoder])

    @precondition(lambda self: self.pd.cache._idle)
    @rule()
    def reset(self) -> None:
        self.pd.cache.reset()

    # -- time and the channel --------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 1.0, LEASE_S / 2, LEASE_S + LEASE_MARGIN_S]))
    def wait(self, seconds: float) -> None:
        self.pd.clock.now += seconds
        self.step()

    @rule()
    def step(self) -> None:
        self._check(self.pd.step())
        self.to_encode += self.pd.mailbox.outbox
        self.pd.mailbox.outbox.clear()
        for encoder in self.encoders.values():
            self._poll(encoder)

    def _poll(self, encoder: EncodeSide) -> None:
        encoder.poll()
        self.to_pd += [(encoder.identity, message) for message in encoder.outbox]
        encoder.outbox.clear()

    def _check(self, placements: list[Placement]) -> None:
        for placement in placements:
            assert self.content[placement.slot.generation] == placement.mm_hash

    @precondition(lambda self: self.to_pd or self.to_encode)
    @rule(data=st.data(), keep=st.sampled_from([False, False, True]), lose=st.booleans())
    def move(self, data: st.DataObject, keep: bool, lose: bool) -> None:
        """Deliver, repeat or lose any one message, whenever it was sent."""
        lane = data.draw(st.sampled_from([x for x in (self.to_pd, self.to_encode) if x]))
        index = data.draw(st.integers(0, len(lane) - 1))
        party, message = lane[index] if keep else lane.pop(index)
        if not keep and lose:
            return
        self._deliver(lane, party, message)

    def _deliver(
        self, lane: list[tuple[bytes, AnyMessage]], party: bytes, message: AnyMessage
    ) -> None:
        if lane is self.to_pd:
            self.pd.mailbox.inbox.append((party, message))
        for encoder in self.encoders.values():
            if lane is self.to_encode and encoder.identity == party:
                encoder.receive(message)

    @rule()
    def deliver_all(self) -> None:
        for lane in (self.to_pd, self.to_encode):
            moved = list(lane)
            lane.clear()
            for party, message in moved:
                self._deliver(lane, party, message)
        self.step()

    @rule(rounds=st.integers(2, 6))
    def all_goes_well_for_a_while(self, rounds: int) -> None:
        for _ in range(rounds):
            self.deliver_all()
            for encoder in self.encoders.values():
                for transfer_id in list(encoder.writes):
                    self._end_write(encoder, transfer_id, "")

    @precondition(lambda self: any(encoder.writes for encoder in self.encoders.values()))
    @rule(data=st.data(), problem=st.sampled_from(["", "", "it broke"]))
    def end_write(self, data: st.DataObject, problem: str) -> None:
        encoder = data.draw(st.sampled_from([e for e in self.encoders.values() if e.writes]))
        self._end_write(encoder, data.draw(st.sampled_from(sorted(encoder.writes))), problem)

    def _end_write(self, encoder: EncodeSide, transfer_id: str, problem: str) -> None:
        if not problem and self.pd.clock.now >= encoder.writes[transfer_id].deadline_s:
            problem = "the lease ended"
        write = encoder.finish_write(transfer_id, problem)
        if not problem:
            self.content[write.slot.generation] = write.mm_hash

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def a_slot_that_may_be_written_is_nobody_else_s(self) -> None:
        if self.path == "tcp":  # the fence refuses late writes
            return
        for encoder in self.encoders.values():
            for write in encoder.writes.values():
                assert write.slot.generation in self.pd.pool._used

    @invariant()
    def every_slot_that_is_out_has_one_owner(self) -> None:
        receiver, session = self.pd.receiver, self.pd.receiver._session
        owned = [c.slot for c in receiver._preallocator._claims.values() if c.slot is not None]
        owned += receiver._preallocator._resident.values()
        for entry in session._quarantine._entries.values():
            owned += entry.slots
        owned += session._quarantine._released
        assert sorted(taken.generation for taken in owned) == sorted(self.pd.pool._used)

    @invariant()
    def nobody_waits_beyond_the_deadline(self) -> None:
        for request_id, record in self.pd.receiver._requests.items():
            late = self.pd.clock.now >= self.arrivals[request_id] + TIMEOUT_S
            assert not (record.awaited and late)

    @invariant()
    def room_in_the_cache_adds_up(self) -> None:
        cache = self.pd.cache
        used = sum(entry.num_embeds for entry in cache._entries.values())
        used += sum(cache._preallocated.values())
        idle = sum(cache._entries[name].num_embeds for name in cache._idle)
        assert cache.num_free_slots == cache.cache_size - used
        assert cache.num_freeable_slots == cache.num_free_slots + idle

    def teardown(self) -> None:
        """Let the channel be perfect from here on: everything ends, everything comes back."""
        for _ in range(3):
            self.pd.clock.now += TIMEOUT_S
            for encoder in self.encoders.values():
                for transfer_id in list(encoder.writes):
                    self._end_write(encoder, transfer_id, "")
            for _ in range(4):
                self.deliver_all()
        assert not any(record.awaited for record in self.pd.receiver._requests.values())
        assert [len(encoder.session) for encoder in self.encoders.values()] == [0, 0]
        for request_id in list(self.pd.requests):
            self.pd.finish(request_id)
        self.deliver_all()
        self.pd.forget_everything()
        assert self.pd.pool.free_bytes == self.pd.pool.capacity_bytes
        assert self.pd.cache.num_free_slots == self.pd.cache.cache_size
        assert not self.pd.cache._awaited


@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize("copies", [False, True], ids=["views", "copies"])
def test_a_lossy_channel_breaks_nothing_and_loses_no_slot(path: str, copies: bool) -> None:
    machine = type("Machine", (LossyChannel,), {"path": path, "copies": copies})
    case = machine.TestCase
    case.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)
    case().runTest()
