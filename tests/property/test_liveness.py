"""Whatever happens to requests and their items, everybody is answered, and nobody is starved.

Requests arrive at engines with few seats, little memory and room for hardly more than one item;
their transfers come, fail, come late, twice or not at all; they are preempted, aborted, and covered
by prefix-cache hits that grow and shrink. Then messages stop, and every request must end within a
bounded number of steps, with all room back.
"""

from __future__ import annotations

from collections import Counter
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

from epd_portable.scheduling.items import Claim, State
from epd_portable.wire.messages import AnyMessage, EncodeFailed
from tests.property.budget import budget, seeded
from tests.unit.runners.engine import Engine
from tests.unit.runners.harness import (
    TIMEOUT_S,
    EncodeSide,
    Item,
    PrefillSide,
    assert_everything_is_back,
)

SIZES = {"ant": 1, "bee": 2, "cat": 3, "dog": 4, "eel": 2, "fox": 3}
LARGEST = max(SIZES.values())
MAX_REQUESTS = 6
EXAMPLES, STEPS = 120, 50

seldom = st.integers(0, 5).map(lambda number: number == 0)
wishes = st.lists(
    st.tuples(
        st.sampled_from(sorted(SIZES)),
        st.sampled_from(["moved", "moved", "bare", "local"]),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda wish: wish[0],
)


class Instance:
    """A prefill+decode instance with its engine, and what is under way to and from it."""

    def __init__(self, name: str, sizes: dict[str, int], *, copies: bool, kind: str) -> None:
        self.address = f"tcp://{name}:1"
        lookahead = sizes["lookahead"]
        self.side = PrefillSide(
            pool_tokens=sizes["pool"],
            cache_tokens=sizes["cache"],
            copies=copies,
            lookahead=lookahead,
            preallocation=kind,  # type: ignore[arg-type]
        )
        self.engine = Engine(
            self.side, seats=sizes["seats"], kv_tokens=sizes["kv"], lookahead=lookahead
        )
        self.history: list[tuple[bytes, AnyMessage]] = []
        self.blamed: set[str] = set()
        """Requests that may be refused: something went wrong while they were here."""

    def blame(self) -> None:
        self.blamed |= {each.request_id for each in self.engine.unfinished}


class Liveness(RuleBasedStateMachine):
    kind = "sync"
    copies = False
    seen: ClassVar[Counter[str]]

    @initialize(
        pds=st.sampled_from([1, 1, 1, 2, 3, 4]),
        encoders=st.sampled_from([1, 1, 2, 3, 4]),
        pool=st.integers(LARGEST, 2 * LARGEST),
        cache=st.integers(LARGEST, 2 * LARGEST),
        seats=st.integers(1, 3),
        kv=st.integers(20, 60),
        lookahead=st.sampled_from([0, 0, 1, 3]),
    )
    def begin(self, pds: int, encoders: int, **sizes: int) -> None:
        self.pds = [
            Instance(f"pd{n}", sizes, copies=self.copies, kind=self.kind) for n in range(pds)
        ]
        self.encoders = [EncodeSide(f"e{n}", self.pds[0].side.clock) for n in range(encoders)]
        for pd in self.pds[1:]:
            pd.side.clock = self.pds[0].side.clock
            pd.side.receiver._clock = pd.side.clock
        self.count = 0
        self.waited: dict[int, tuple[Instance, Claim]] = {}
        self.served: set[int] = set()

    def _pd(self, number: int) -> Instance:
        return self.pds[number % len(self.pds)]

    def _encoder(self, number: int) -> EncodeSide:
        return self.encoders[number % len(self.encoders)]

    # -- requests ----------------------------------------------------------------------------------

    @rule(
        number=st.integers(0, 3),
        wanted=wishes,
        hit=st.sampled_from([0, 0, 0, 2, 4, 6]),
        ready=st.booleans(),
        early=st.integers(0, 2),
        lead=st.integers(0, 1),
    )
    def arrive(
        self,
        number: int,
        wanted: list[tuple[str, str, int]],
        hit: int,
        ready: bool,
        early: int,
        lead: int,
    ) -> None:
        """A request arrives; ``early`` rounds after its encode jobs."""
        pd = self._pd(number)
        if len(pd.engine.unfinished) >= MAX_REQUESTS:
            return
        self.count += 1
        request_id = f"r{self.count}"
        items = []
        for name, kind, encoder in wanted:
            transfer_id = "" if kind == "local" else f"{request_id}-{name}"
            metadata_only = kind == "bare"
            item = Item(name, SIZES[name], transfer_id, not metadata_only, not metadata_only)
            items.append(item)
            if transfer_id:
                self._encoder(encoder).submit(item, ready=ready, consumer=pd.address)
        for _ in range(early):
            self.carry()
            self._step(pd)
        pd.engine.add(request_id, *items, hit=hit, lead=lead)
        if pd.side.receiver._requests[request_id].failed:
            pd.blamed.add(request_id)  # a drafter would need more of its items than fit
        if self.kind == "async" and early:
            pd.blamed.add(request_id)  # what came too early may have gone before its turn

    @rule(number=st.integers(0, 3))
    def text(self, number: int) -> None:
        pd = self._pd(number)
        if len(pd.engine.unfinished) < MAX_REQUESTS:
            self.count += 1
            pd.engine.add(f"r{self.count}")

    @rule(number=st.integers(0, 3), data=st.data(), really=seldom)
    def abort(self, number: int, data: st.DataObject, really: bool) -> None:
        pd = self._pd(number)
        if really and pd.engine.unfinished:
            request = data.draw(st.sampled_from(pd.engine.unfinished))
            pd.engine.abort(request.request_id)

    @rule(number=st.integers(0, 3), really=st.booleans())
    def preempt(self, number: int, really: bool) -> None:
        pd = self._pd(number)
        if really and pd.engine.running:
            pd.blame()
            pd.engine.preempt()

    @precondition(lambda self: any(pd.engine.waiting for pd in self.pds))
    @rule(data=st.data(), seen=st.integers(2, 12), then=st.sampled_from([0, 0, 2, 5]))
    def ask_in_vain(self, data: st.DataObject, seen: int, then: int) -> None:
        """The engine asks, sees a hit, and has no memory for newcomers; then the hit is another."""
        pd = data.draw(st.sampled_from([each for each in self.pds if each.engine.waiting]))
        request = data.draw(st.sampled_from(pd.engine.waiting))
        request.hit = seen
        pd.engine.has_room = False
        self._step(pd)
        pd.engine.has_room = True
        request.hit = then

    @rule(number=st.integers(0, 3), really=seldom)
    def reset(self, number: int, really: bool) -> None:
        pd = self._pd(number)
        if really:
            pd.blame()
            pd.side.cache.reset()

    # -- transfers ---------------------------------------------------------------------------------

    @rule(number=st.integers(0, 3), name=st.sampled_from(sorted(SIZES)))
    def output_ready(self, number: int, name: str) -> None:
        self._encoder(number).session.output_ready(name)

    @precondition(lambda self: any(encoder.writes for encoder in self.encoders))
    @rule(number=st.integers(0, 3), data=st.data(), problem=st.sampled_from(["", "", "it broke"]))
    def end_a_write(self, number: int, data: st.DataObject, problem: str) -> None:
        encoder = self._encoder(number)
        if encoder.writes:
            transfer_id = data.draw(st.sampled_from(sorted(encoder.writes)))
            if problem:
                self._blame_all()
            encoder.finish_write(transfer_id, problem)

    @rule(number=st.integers(0, 3), data=st.data(), really=seldom)
    def nobody_encodes(self, number: int, data: st.DataObject, really: bool) -> None:
        pd = self._pd(number)
        transfers = sorted(pd.side.receiver._session._transfers)
        if really and transfers:
            pd.blame()
            transfer_id = data.draw(st.sampled_from(transfers))
            failed = EncodeFailed(transfer_id=transfer_id, reason="nobody encodes it")
            pd.side.mailbox.inbox.append((b"router", failed))

    @rule(number=st.integers(0, 3), data=st.data())
    def repeat(self, number: int, data: st.DataObject) -> None:
        """A message comes once more, however old."""
        pd = self._pd(number)
        if pd.history:
            pd.side.mailbox.inbox.append(data.draw(st.sampled_from(pd.history)))

    @rule(seconds=st.sampled_from([1.0, 5.0, TIMEOUT_S / 2]), really=seldom)
    def wait(self, seconds: float, really: bool) -> None:
        if really:
            self._blame_all()
            self.pds[0].side.clock.now += seconds

    def _blame_all(self) -> None:
        for pd in self.pds:
            pd.blame()

    # -- steps -------------------------------------------------------------------------------------

    @rule(number=st.integers(0, 3))
    def step(self, number: int) -> None:
        self._step(self._pd(number))

    @rule(rounds=st.integers(1, 3))
    def all_goes_well_for_a_while(self, rounds: int) -> None:
        for _ in range(rounds):
            self.carry()
            for pd in self.pds:
                self._step(pd)
            self.carry()
            for encoder in self.encoders:
                for transfer_id in list(encoder.writes):
                    encoder.finish_write(transfer_id)

    @rule()
    def carry(self) -> None:
        """Bring every message to its end."""
        for encoder in self.encoders:
            encoder.poll()
            for address, message in encoder.sent:
                (pd,) = (each for each in self.pds if each.address == address)
                pd.side.mailbox.inbox.append((encoder.identity, message))
                pd.history = [*pd.history[-20:], (encoder.identity, message)]
            encoder.sent.clear()
            encoder.outbox.clear()
        for pd in self.pds:
            for identity, message in pd.side.mailbox.outbox:
                for encoder in self.encoders:
                    if encoder.identity == identity:
                        encoder.receive(message, consumer=pd.address)
            pd.side.mailbox.outbox.clear()

    def _step(self, pd: Instance) -> None:
        answered, refused = len(pd.engine.answered), len(pd.engine.refused)
        pd.engine.step()
        self.seen["steps"] += 1
        self.seen["answered"] += len(pd.engine.answered) - answered
        for request_id in pd.engine.refused[refused:]:
            self.seen["refused"] += 1
            assert request_id in pd.blamed, "it was refused, and nothing had gone wrong"
        assert not pd.engine.stopped_at, "a picture held up whoever came behind it"

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def nobody_is_overtaken(self) -> None:
        """Nobody is given room while a claim waits that comes before."""
        if not hasattr(self, "pds"):
            return
        claims = [(pd, c) for pd in self.pds for c in _claims(pd)]
        waiting = {id(claim): (pd, claim) for pd, claim in claims if not claim.served}
        served = {id(claim): (pd, claim) for pd, claim in claims if claim.served}
        for key, (pd, claim) in waiting.items():
            if key not in self.waited:
                continue
            self.seen["waited"] += 1
            for other, (where, late) in served.items():
                if where is pd and other not in self.served and not late.who.running:
                    assert _order(late) < _order(claim), "it was overtaken"
        self.waited, self.served = waiting, set(served)

    @invariant()
    def room_adds_up(self) -> None:
        for pd in getattr(self, "pds", ()):
            cache = pd.side.cache
            roomy = [item for item in cache.items.values() if item.state is not State.WAITING]
            used = sum(item.num_embeds for item in roomy)
            idle = [item for item in roomy if item.is_here and not item.holders]
            assert cache.num_free_slots == cache.cache_size - used >= 0
            assert cache.num_freeable_slots == cache.num_free_slots + sum(
                item.num_embeds for item in idle
            )
            assert set(cache._idle) == {item.mm_hash for item in idle}
            for item in roomy:
                if item.state in (State.LOCAL, State.RESERVED):
                    assert item.holders, f"{item.mm_hash} keeps room for nobody"
            out = pd.side.pool._used
            session = pd.side.receiver._session
            owned = [item.slot for item in cache.items.values() if item.slot is not None]
            owned += cache._resident.values()
            owned += (entry.slot for entry in session._quarantine._entries.values())
            owned += pd.side.receiver._orders._taken_back
            assert sorted(slot.generation for slot in owned) == sorted(out)
            for claim in _claims(pd):
                assert claim.served == (claim.who.request_id in claim.item.holders)
                assert claim.served != (claim.who.request_id in claim.item.wanted)
                assert cache.items[claim.item.mm_hash] is claim.item

    def teardown(self) -> None:
        """Messages stop; time goes on."""
        if not hasattr(self, "pds"):
            return
        self._blame_all()
        for pd in self.pds:
            pd.side.mailbox.gone |= {encoder.session_id for encoder in self.encoders}
            pd.side.mailbox.inbox.clear()
            for request in pd.engine.unfinished:
                request.hit = 0
            bound = int(TIMEOUT_S) + 12 * sum(
                1 + len(pd.side.items[each.request_id]) for each in pd.engine.unfinished
            )
            for _ in range(bound):
                if not pd.engine.unfinished:
                    break
                pd.side.clock.now += 1.0
                self._step(pd)
                self.room_adds_up()
            assert not pd.engine.unfinished, "somebody waits for ever"
            pd.side.clock.now += TIMEOUT_S + 2
            for _ in range(3):
                pd.side.step()
            assert_everything_is_back(pd.side)


def _claims(pd: Instance) -> list[Claim]:
    return [claim for who in pd.side.cache._claimants.values() for claim in who.claims.values()]


def _order(claim: Claim) -> tuple[tuple[bool, int], int]:
    return claim.who.rank, claim.place


@pytest.mark.parametrize(
    ("number", "kind", "copies"),
    [(21, "sync", False), (22, "sync", True), (23, "async", False), (24, "async", True)],
)
def test_everybody_is_answered_and_nobody_is_starved(number: int, kind: str, copies: bool) -> None:
    seen: Counter[str] = Counter()
    machine = type("Machine", (Liveness,), {"kind": kind, "copies": copies, "seen": seen})
    run_state_machine_as_test(seeded(number, machine), settings=budget(EXAMPLES, steps=STEPS))
    assert {"answered", "refused", "waited"} <= set(+seen), seen
    assert seen["steps"] > 10 * EXAMPLES, seen
