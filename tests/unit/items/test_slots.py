from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_portable.errors import ConfigError
from epd_portable.items.slots import ReceivePool, Slot, SlotState
from tests.unit.builders import slot


def test_two_lives_of_a_pool_grant_different_slots() -> None:
    first, second = (ReceivePool("pool", 64, 64).reserve(64) for _ in range(2))
    assert first is not None and second is not None
    assert first.descriptor != second.descriptor


def test_giving_back_twice_or_elsewhere_is_refused() -> None:
    pool = ReceivePool("pool", 64, 64)
    taken = pool.reserve(64)
    assert taken is not None
    pool.free(taken)
    with pytest.raises(ValueError, match="not in use"):
        pool.free(taken)
    with pytest.raises(ValueError, match="not in use"):
        pool.free(Slot(slot(1), "cat", 64))
    with pytest.raises(ValueError, match="must be positive"):
        pool.reserve(0)


def test_a_slot_goes_through_the_states_of_the_diagram_only() -> None:
    pool = ReceivePool("pool", 64, 64)
    taken = pool.reserve(64, "cat")
    assert taken is not None
    for state in (SlotState.RESIDENT, SlotState.QUARANTINED, SlotState.RETIRING):
        with pytest.raises(AssertionError, match="RESERVED to"):
            pool.move(taken, state)
    pool.move(taken, SlotState.LEASED)
    with pytest.raises(AssertionError, match="LEASED cannot be freed"):
        pool.free(taken)
    pool.move(taken, SlotState.RESIDENT)
    assert pool.resident == {"cat": taken}
    pool.move(taken, SlotState.RETIRING)
    assert pool.resident == {}


def test_retiring_slot_is_free_at_the_end_of_its_step() -> None:
    pool = ReceivePool("pool", 64, 64)
    taken = pool.reserve(64, "cat")
    assert taken is not None
    for state in (SlotState.LEASED, SlotState.QUARANTINED, SlotState.RETIRING):
        pool.move(taken, state)
    assert not pool.step_ended(1), "workers do not know yet"
    assert pool.pass_on(2) == [taken]
    assert pool.pass_on(3) == []
    assert not pool.step_ended(1)
    assert pool.step_ended(2)
    assert pool.free_bytes == 64


def test_a_pool_without_room_for_one_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"transfer\.pool_bytes"):
        ReceivePool("pool", 63, 64)


class PoolAgainstModel(RuleBasedStateMachine):
    """No two slots overlap, everything that was given back can be had again."""

    CAPACITY, ALIGNMENT = 1024, 64

    def __init__(self) -> None:
        super().__init__()
        self.pool = ReceivePool("pool", self.CAPACITY + self.ALIGNMENT - 1, self.ALIGNMENT)
        self.out: list[Slot] = []
        self.generations: set[int] = set()

    def occupied(self) -> list[bool]:
        """Return for every unit of the alignment whether a slot is there."""
        units = [False] * (self.CAPACITY // self.ALIGNMENT)
        for taken in self.out:
            first = taken.descriptor.offset // self.ALIGNMENT
            for unit in range(first, first + -(-taken.descriptor.nbytes // self.ALIGNMENT)):
                assert not units[unit], "two slots overlap"
                units[unit] = True
        return units

    @rule(nbytes=st.integers(1, CAPACITY + 1))
    def take(self, nbytes: int) -> None:
        need = -(-nbytes // self.ALIGNMENT)
        free_runs = "".join("x" if used else "." for used in self.occupied()).split("x")
        taken = self.pool.reserve(nbytes)
        assert (taken is not None) == any(len(run) >= need for run in free_runs)
        if taken is not None:
            made = taken.descriptor
            assert (made.nbytes, made.offset % self.ALIGNMENT) == (nbytes, 0)
            assert made.generation not in self.generations
            self.generations.add(made.generation)
            self.out.append(taken)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        taken = data.draw(st.sampled_from(self.out))
        self.out.remove(taken)
        self.pool.free(taken)

    @invariant()
    def free_bytes_are_what_no_slot_occupies(self) -> None:
        assert self.pool.free_bytes == self.occupied().count(False) * self.ALIGNMENT


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=40, deadline=None)
