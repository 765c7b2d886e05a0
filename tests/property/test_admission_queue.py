"""The front's gate against a model of who is where.

Requests come, end, give parts back and go away, and limits change, in any order. Nothing in flight
is beyond its limit, nobody is lost or let in twice, order holds, nobody waits for nothing, keys
share, and everybody goes in the end.
"""

from __future__ import annotations

from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from epd_portable.placement.admission import AdmissionQueue, Limit, QueuedRequest
from tests.property.budget import budget, seeded

KINDS = range(3)
KEYS = (b"ada", b"bob", b"eve")
EXAMPLES, STEPS = 50, 60

limits = st.one_of(st.none(), st.integers(1, 6))
amounts = st.tuples(st.just(1), st.integers(0, 4), st.integers(0, 8))


class AtTheGate(RuleBasedStateMachine):
    """Asks the gate as admission does: after every change it admits, and turns one away."""

    turned_away_ever: ClassVar[int] = 0

    @initialize(first=st.tuples(limits, limits, limits), max_waiting=st.integers(1, 4))
    def open(self, first: tuple[Limit, Limit, Limit], max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.limits = list(first)
        self.gate = AdmissionQueue(first, max_waiting=self.max_waiting)
        self.entered = 0
        self.waiting: list[QueuedRequest] = []
        self.going: list[QueuedRequest] = []
        self.turned_away = 0
        self.left = 0
        # Beyond a limit that has fallen may be what was within it before.
        self.bounds = [0 if limit is None else limit for limit in self.limits]

    def lacks(self, ticket: QueuedRequest) -> set[int]:
        return {
            kind
            for kind, (limit, amount) in enumerate(zip(self.limits, ticket.amounts, strict=True))
            if limit and amount and self.gate.used[kind] + min(amount, limit) > limit
        }

    def settle(self) -> None:
        for ticket in self.gate.admit():
            assert ticket in self.waiting
            before = [
                other
                for other in self.waiting
                if (other.priority, other.key, other.lane)
                == (ticket.priority, ticket.key, ticket.lane)
            ]
            assert before[0] is ticket, "one came before of the same key, priority and kind"
            self.waiting.remove(ticket)
            self.going.append(ticket)
        for ticket in self.waiting:
            blocking = [
                other
                for other in self.waiting
                if other.priority <= ticket.priority and self.lacks(other)
            ]
            assert any(
                other.lane & ticket.lane & sum(1 << kind for kind in self.lacks(other))
                for other in blocking
            ), "nothing keeps it from going"

    @rule(taken=amounts, key=st.sampled_from(KEYS), priority=st.integers(-1, 1))
    def enter(self, taken: tuple[int, int, int], key: bytes, priority: int) -> None:
        ticket = QueuedRequest(taken, key=key, priority=priority)
        self.entered += 1
        anybody = bool(self.waiting)
        self.gate.enter(ticket)
        if ticket.where == "admitted":
            assert not anybody
            self.going.append(ticket)
            return
        self.waiting.append(ticket)
        others = list(self.going)
        self.settle()
        went = set(self.going) - set(others)
        if ticket not in went:
            assert not went, "who came made room"
        # Its key has had something now, so that others of this priority may be before the key.
        assert all(other.key != key for other in went - {ticket}), "who came made room"
        surplus = self.gate.reject()
        assert (surplus is not None) == (len(self.waiting) > self.max_waiting)
        if surplus is not None:
            assert surplus.priority == max(each.priority for each in self.waiting)
            self.waiting.remove(surplus)
            self.turned_away += 1
            AtTheGate.turned_away_ever += 1

    @precondition(lambda self: self.going)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.going))
        self.going.remove(ticket)
        self.leave(ticket)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def go_away(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(ticket)
        self.leave(ticket)

    def leave(self, ticket: QueuedRequest) -> None:
        self.left += 1
        self.gate.leave(ticket)
        self.gate.leave(ticket)
        self.settle()

    @precondition(lambda self: self.going)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.gate.release(data.draw(st.sampled_from(self.going)), [2])
        self.settle()

    @rule(kind=st.sampled_from(KINDS), limit=limits)
    def change(self, kind: int, limit: Limit) -> None:
        self.limits[kind] = limit
        self.gate.set_limit(kind, limit)
        self.settle()

    @invariant()
    def nothing_is_beyond_its_limit(self) -> None:
        for kind, limit in enumerate(self.limits):
            used = self.gate.used[kind]
            assert used == sum(ticket.taken[kind] for ticket in self.going)
            if limit is not None and used > limit:
                assert used <= self.bounds[kind], "it has grown beyond a limit"
            self.bounds[kind] = max(used, limit or 0)

    @invariant()
    def nobody_is_lost(self) -> None:
        assert self.gate.admitted == len(self.going)
        assert self.gate.waiting == len(self.waiting)
        assert self.entered == len(self.going) + len(self.waiting) + self.turned_away + self.left
        assert all(ticket.where == "waiting" for ticket in self.waiting)
        assert all(ticket.where == "admitted" for ticket in self.going)

    def teardown(self) -> None:
        """Whatever has happened: who waits goes when others end."""
        while self.going or self.waiting:
            assert self.going, "they wait for nobody"
            self.leave(self.going.pop(0))
        assert self.gate.used == [0] * len(KINDS)


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
def test_the_gate_holds_its_limits_and_its_order() -> None:
    run_state_machine_as_test(seeded(1, AtTheGate), settings=budget(EXAMPLES, steps=STEPS))
    assert AtTheGate.turned_away_ever > EXAMPLES // 4, "max_waiting was hardly ever exceeded"


@budget(100)
@given(
    limit=st.integers(1, 8),
    sizes=st.tuples(*[st.lists(st.integers(1, 8), min_size=1, max_size=20)] * 2),
    ends=st.lists(st.integers(0, 7), max_size=80),
)
def test_waiting_keys_differ_by_at_most_two_requests(
    limit: int, sizes: tuple[list[int], list[int]], ends: list[int]
) -> None:
    gate = AdmissionQueue([limit], max_waiting=100)
    first = QueuedRequest([limit])
    gate.enter(first)
    for key, of_key in zip(KEYS, sizes, strict=False):
        for size in of_key:
            gate.enter(QueuedRequest([size], key=key))
    going, given_to = [first], {KEYS[0]: [0.0], KEYS[1]: [0.0]}
    for end in ends:
        if not going:
            break
        gate.leave(going.pop(end % len(going)))
        for ticket in gate.admit():
            going.append(ticket)
            given_to[ticket.key].append(min(ticket.amounts[0] / limit, 1.0))
        if any(
            len(had) > len(of_key) for had, of_key in zip(given_to.values(), sizes, strict=True)
        ):
            break  # One of them waits no longer.
        ahead = sum(given_to[KEYS[0]]) - sum(given_to[KEYS[1]])
        assert abs(ahead) <= 2.0 + 1e-9


@budget(50)
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=30), limit=st.integers(1, 6))
def test_a_flood_of_small_requests_starves_no_large_one(sizes: list[int], limit: int) -> None:
    gate = AdmissionQueue([limit], max_waiting=1000)
    before = [QueuedRequest([size]) for size in sizes]
    large = QueuedRequest([limit])
    for ticket in (*before, large):
        gate.enter(ticket)
    going = [ticket for ticket in before if ticket.where == "admitted"]
    ends = 0
    while large.where != "admitted":
        gate.leave(going.pop(0))
        ends += 1
        gate.enter(QueuedRequest([1]))
        going += gate.admit()
    assert ends <= len(before)
