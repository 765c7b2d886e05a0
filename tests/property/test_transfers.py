"""The whole protocol between encode and PD instances, whatever the network and the instances do.

A slot is never granted to two writers, and never written when it is somebody else's; what is placed
is the item's own bytes; every item that a request awaits is there or given up at its deadline; and
when all is quiet nobody holds anything, in tables that never grow beyond their limits.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from epd_portable.items import transfers
from epd_portable.items.table import State
from epd_portable.items.transfers import LEASE_MARGIN_S
from epd_portable.wire.messages import Grant
from tests.property.budget import budget, seeded
from tests.property.world import Encoder, Item, Parcel, Pd, tokens, write_unit
from tests.unit.items.harness import LEASE_S, TIMEOUT_S, assert_everything_is_back

SIZES = {"cat": 1, "dog": 2, "emu": 3, "fox": 4}
PDS, ENCODERS = ("p", "q"), ("a", "b", "unfit")
MAX_REQUESTS, MAX_LIVES, HISTORY = 5, 4, 30
MAX_ENDED, MAX_EARLY = 4, 2
EXAMPLES, STEPS = 80, 60

seldom = st.integers(0, 3).map(lambda number: number == 0)
names = st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=3)


class Transfers(RuleBasedStateMachine):
    path = "shm"
    copies = False
    seen: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.pds = {name: Pd(name, path=self.path, copies=self.copies) for name in PDS}
        self.encoders = {
            name: Encoder(name, *(["other"] if name == "unfit" else [])) for name in ENCODERS
        }
        self.network: list[Parcel] = []
        self.history: deque[Parcel] = deque(maxlen=HISTORY)
        self.grants: deque[Parcel] = deque(maxlen=HISTORY)
        self.orders: dict[str, tuple[str, Item]] = {}
        self.count = 0

    # -- what clients, the front and the encoders do -----------------------------------------------

    @rule(
        pd=st.sampled_from(PDS),
        wanted=names,
        encoder=st.sampled_from(("a", "b", "a", "b", "unfit")),
        ready=st.sampled_from([True, True, False]),
        order_first=st.booleans(),
    )
    def arrive(
        self, pd: str, wanted: list[str], encoder: str, ready: bool, order_first: bool
    ) -> None:
        end = self.pds[pd]
        if len(end.side.requests) >= MAX_REQUESTS:
            return
        self.count += 1
        request_id = f"r{self.count}"
        items = [Item(name, SIZES[name], f"{request_id}-{name}") for name in wanted]
        self.orders.update({item.transfer_id: (pd, item) for item in items})
        if order_first:
            self._order(encoder, items, ready)
        end.side.arrive(request_id, *items)
        end.arrivals[request_id] = end.clock.now
        if not order_first:
            self._order(encoder, items, ready)

    @precondition(lambda self: self.orders)
    @rule(data=st.data())
    def arrive_again(self, data: st.DataObject) -> None:
        """A request comes that names a transfer of old, perhaps to another life of the instance."""
        pd, item = self.orders[data.draw(st.sampled_from(sorted(self.orders)))]
        end = self.pds[pd]
        if len(end.side.requests) < MAX_REQUESTS:
            self.count += 1
            end.side.arrive(f"r{self.count}", item)
            end.arrivals[f"r{self.count}"] = end.clock.now

    def _order(self, encoder: str, items: list[Item], ready: bool) -> None:
        for item in items:
            address = self.pds[self.orders[item.transfer_id][0]].address
            self.encoders[encoder].side.submit(item, ready=ready, consumer=address)

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), encoder=st.sampled_from(ENCODERS), ready=st.just(True))
    def ask(self, data: st.DataObject, encoder: str, ready: bool) -> None:
        """Ask any encoder for any transfer, perhaps not for the first time."""
        transfer_id = data.draw(st.sampled_from(sorted(self.orders)))
        self._order(encoder, [self.orders[transfer_id][1]], ready)

    @rule(encoder=st.sampled_from(ENCODERS), name=st.sampled_from(sorted(SIZES)))
    def output_ready(self, encoder: str, name: str) -> None:
        self.encoders[encoder].side.session.output_ready(name)

    # -- what the engines do -----------------------------------------------------------------------

    @rule(pd=st.sampled_from(PDS), data=st.data(), really=seldom)
    def finish(self, pd: str, data: st.DataObject, really: bool) -> None:
        """End a request: it is answered, or the client went away."""
        end = self.pds[pd]
        if really and end.side.requests:
            request_id = data.draw(st.sampled_from(sorted(end.side.requests)))
            end.side.finish(request_id)
            del end.arrivals[request_id]

    @rule(pd=st.sampled_from(PDS), data=st.data())
    def compute(self, pd: str, data: st.DataObject) -> None:
        """Let a request take what it may: items in the cache, and those that it encodes here."""
        side = self.pds[pd].side
        if not side.requests:
            return
        request_id = data.draw(st.sampled_from(sorted(side.requests)))
        for item in side.items[request_id]:
            if not side.prefill.may_schedule(request_id, item.begin):
                break
            if not side.encode_here(request_id, item.input_id):
                break
            side.cache.free_encoder_input(side.requests[request_id], item.input_id)

    @rule(pd=st.sampled_from(PDS), really=seldom)
    def reset_cache(self, pd: str, really: bool) -> None:
        """Somebody empties the encoder cache of an instance."""
        if really:
            self.pds[pd].side.cache.reset()

    @rule(encoder=st.sampled_from(ENCODERS), really=seldom)
    def restart_encoder(self, encoder: str, really: bool) -> None:
        end = self.encoders[encoder]
        if really and end.life < MAX_LIVES:
            for pd in self.pds.values():
                pd.gone.add(end.side.session_id)
            end.start()

    @rule(pd=st.sampled_from(PDS), really=seldom)
    def restart_pd(self, pd: str, really: bool) -> None:
        if really and self.pds[pd].life < MAX_LIVES:
            self.pds[pd].start()

    # -- time --------------------------------------------------------------------------------------

    @rule(
        seconds=st.sampled_from([0.1, 1.0, 1.0, LEASE_S / 2, LEASE_S + LEASE_MARGIN_S]),
        computes=st.booleans(),
    )
    def wait(self, seconds: float, computes: bool = True) -> None:
        for end in (*self.pds.values(), *self.encoders.values()):
            end.clock.now += seconds
        self.step(computes)

    @rule(
        name=st.sampled_from(PDS + ENCODERS),
        seconds=st.sampled_from([LEASE_S + LEASE_MARGIN_S, TIMEOUT_S, 1e6]),
        really=seldom,
    )
    def jump(self, name: str, seconds: float, really: bool) -> None:
        """The clock of one process jumps, or the process was stopped for so long."""
        if not really:
            return
        end = self.pds.get(name) or self.encoders[name]
        end.clock.now += seconds
        self.step()

    @precondition(lambda self: any(e.side.writes for e in self.encoders.values()))
    @rule(data=st.data(), rounds=st.integers(0, 3))
    def outlive_a_lease(self, data: st.DataObject, rounds: int) -> None:
        """A write that is under way takes longer than its lease, and messages are exchanged."""
        busy = [encoder for encoder in self.encoders.values() if encoder.side.writes]
        encoder = data.draw(st.sampled_from(busy))
        transfer_id = data.draw(st.sampled_from(sorted(encoder.side.writes)))
        self.pds[self.orders[transfer_id][0]].clock.now += LEASE_S + LEASE_MARGIN_S
        self.step()
        for _ in range(rounds):
            self.deliver_all()

    @rule(computes=st.booleans())
    def step(self, computes: bool = True) -> None:
        for name, pd in self.pds.items():
            pd.step(computes=computes)
            for identity, message in pd.side.mailbox.outbox:
                encoder = identity.decode().partition("-")[0]
                if encoder in self.encoders:
                    self._send(Parcel(encoder, identity, name, False, message))
            pd.side.mailbox.outbox.clear()
        for name, encoder in self.encoders.items():
            for address, message in encoder.poll():
                (pd_name,) = (n for n, each in self.pds.items() if each.address == address)
                self._send(Parcel(name, encoder.side.identity, pd_name, True, message))

    # -- the network -------------------------------------------------------------------------------

    def _send(self, parcel: Parcel) -> None:
        self.network.append(parcel)
        self.history.append(parcel)
        if isinstance(parcel.message, Grant):
            self.grants.append(parcel)

    def _deliver(self, parcel: Parcel) -> None:
        self.seen[type(parcel.message).__name__] += 1
        pd = self.pds[parcel.pd]
        if parcel.to_pd:
            pd.side.mailbox.inbox.append((parcel.identity, parcel.message))
        else:
            self.encoders[parcel.encoder].side.receive(parcel.message, consumer=pd.address)

    @precondition(lambda self: self.network)
    @rule(data=st.data(), keep=seldom, lose=seldom)
    def move(self, data: st.DataObject, keep: bool, lose: bool) -> None:
        """Deliver, repeat or lose any message that is under way, whenever it was sent."""
        index = data.draw(st.integers(0, len(self.network) - 1))
        parcel = self.network[index] if keep else self.network.pop(index)
        if keep or not lose:
            self._deliver(parcel)

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        """Deliver an old message again, to whatever life its receiver has."""
        index = data.draw(st.integers(0, len(self.history) - 1))
        self.seen["replayed"] += 1
        self._deliver(self.history[index])

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def haunt(self, data: st.DataObject) -> None:
        """An encoder is asked for a transfer again, and hears the grant of an earlier attempt."""
        parcel = self.grants[data.draw(st.integers(0, len(self.grants) - 1))]
        transfer_id = parcel.message.transfer_id
        self._order(parcel.encoder, [self.orders[transfer_id][1]], True)
        self._deliver(parcel)
        self.step()

    @rule(computes=st.booleans())
    def deliver_all(self, computes: bool = True) -> None:
        moved, self.network = self.network, []
        for parcel in moved:
            self._deliver(parcel)
        self.step(computes)

    @rule(rounds=st.integers(2, 6), computes=st.booleans())
    def all_goes_well_for_a_while(self, rounds: int, computes: bool = True) -> None:
        for _ in range(rounds):
            self.deliver_all(computes)
            for encoder in self.encoders.values():
                for transfer_id in list(encoder.side.writes):
                    self._write(encoder, transfer_id)

    # -- writes ------------------------------------------------------------------------------------

    @precondition(lambda self: any(e.side.writes for e in self.encoders.values()))
    @rule(data=st.data(), problem=st.sampled_from(["", "", "", "it broke"]), one=st.booleans())
    def write(self, data: st.DataObject, problem: str, one: bool) -> None:
        """Go on with a write that is under way: one unit of it, or its rest and its end."""
        busy = [encoder for encoder in self.encoders.values() if encoder.side.writes]
        encoder = data.draw(st.sampled_from(busy))
        transfer_id = data.draw(st.sampled_from(sorted(encoder.side.writes)))
        if one and encoder.progress.get(transfer_id, 0) < tokens(encoder.side.writes[transfer_id]):
            problem = write_unit(encoder, transfer_id, self.pds[self.orders[transfer_id][0]])
            if not problem:
                return
        self._write(encoder, transfer_id, problem)

    def _write(self, encoder: Encoder, transfer_id: str, problem: str = "") -> None:
        pd = self.pds[self.orders[transfer_id][0]]
        size = tokens(encoder.side.writes[transfer_id])
        while not problem and encoder.progress.get(transfer_id, 0) < size:
            problem = write_unit(encoder, transfer_id, pd)
        encoder.progress.pop(transfer_id, None)
        encoder.side.finish_write(transfer_id, problem)

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def what_is_resident_holds_its_own_bytes(self) -> None:
        self.seen["steps"] += 1
        for pd in self.pds.values():
            used = pd.side.pool.slots
            for placement in pd.resident:
                if placement.slot.generation in used:
                    pd.check(placement)

    @invariant()
    def every_slot_that_is_out_has_one_owner(self) -> None:
        for pd in self.pds.values():
            cache, session = pd.side.cache, pd.side.shell._transfers
            owned = [item.slot for item in cache.items.values() if item.slot is not None]
            owned += [*pd.side.pool.resident.values(), *pd.side.pool.retiring]
            owned += (entry.slot for entry in session._quarantine._entries.values())
            assert {*map(id, owned)} == {*map(id, pd.side.pool.slots.values())}
            assert len(owned) == len(pd.side.pool.slots)

    @invariant()
    def nobody_waits_beyond_the_deadline(self) -> None:
        """A request that has expired waits for cache space only; transfers for others go on."""
        for pd in self.pds.values():
            for request_id, record in pd.side.shell.cache.requests.items():
                assert record.expired == (pd.clock.now >= pd.arrivals[request_id] + TIMEOUT_S)
                for claim in record.claims.values() if record.expired else ():
                    assert not claim.by_transfer
                    assert claim.item.state is not State.RESERVED or claim.metadata_only
            for transfer in pd.side.shell._transfers._transfers.values():
                assert pd.clock.now < transfer.deadline_s
                assert transfer.grant is None or pd.clock.now < transfer.lease_end_s

    @invariant()
    def tables_are_bounded(self) -> None:
        for pd in self.pds.values():
            session = pd.side.shell._transfers
            self.seen["quarantined"] += len(session._quarantine)
            assert len(session._ended) <= MAX_ENDED
            assert len(session._early) <= MAX_EARLY
            assert all(session._next_due_s <= each.due_s for each in session._transfers.values())
            for transfer in session._transfers.values():
                self.seen["refused"] += len(transfer.refused)
                assert len(transfer.refused) <= transfers.MAX_REFUSED

    @invariant()
    def room_in_the_cache_adds_up(self) -> None:
        for pd in self.pds.values():
            cache = pd.side.cache
            items = list(cache.items.values())
            used = sum(item.num_embeds for item in items if item.state is not State.WAITING)
            idle = [item for item in items if item.is_here and not item.holders]
            assert cache.num_free_slots == cache.cache_size - used >= 0
            assert cache.num_freeable_slots == cache.num_free_slots + sum(
                item.num_embeds for item in idle
            )
            assert set(cache._idle) == {item.mm_hash for item in idle}
            assert all(name == item.mm_hash for name, item in cache.items.items())
            for item in items:
                assert item.state is not State.WAITING or item.pending or item.transfers
                has_slot = item.state in (State.RESERVED, State.GRANTED)
                assert (item.slot is not None) == has_slot

    def teardown(self) -> None:
        """Let the network be perfect from here on: everything ends, everything comes back."""
        for _ in range(3):
            self.wait(TIMEOUT_S)
            self.all_goes_well_for_a_while(4)
        for encoder in self.encoders.values():
            assert len(encoder.side.session) == 0
        self.seen["placed"] += sum(pd.placed for pd in self.pds.values())
        self.seen["placed_early"] += sum(pd.placed_early for pd in self.pds.values())
        for pd in self.pds.values():
            for request_id in list(pd.side.requests):
                pd.side.finish(request_id)
        self.all_goes_well_for_a_while(4)
        for pd in self.pds.values():
            session = pd.side.shell._transfers
            assert not session._transfers
            assert not len(session._quarantine)
            assert not len(session._early)
            assert_everything_is_back(pd.side)


@pytest.mark.parametrize(
    ("number", "path", "copies"),
    [
        pytest.param(1, "shm", False, marks=pytest.mark.full),
        (2, "shm", True),
        (3, "tcp", False),
        pytest.param(4, "tcp", True, marks=pytest.mark.full),
    ],
)
def test_bytes_reach_their_slots_and_nothing_stays_held(
    number: int, path: str, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "MAX_ENDED", MAX_ENDED)
    monkeypatch.setattr(transfers, "MAX_EARLY", MAX_EARLY)
    seen: Counter[str] = Counter()
    machine = type("Machine", (Transfers,), {"path": path, "copies": copies, "seen": seen})
    run_state_machine_as_test(seeded(number, machine), settings=budget(EXAMPLES, steps=STEPS))
    assert seen["steps"] > EXAMPLES * STEPS / 2, seen
    common = {"Announce", "Grant", "Written", "Injected", "Abort", "Nack", "NotNeeded", "Later"}
    assert common | {"placed", "refused", "replayed"} <= set(+seen), seen
    assert path == "tcp" or seen["quarantined"], seen
    assert bool(seen["placed_early"]) == copies, seen
