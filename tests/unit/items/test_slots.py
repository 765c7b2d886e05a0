from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_portable.errors import ConfigError
from epd_portable.items.slots import ReceivePool
from epd_portable.wire.descriptors import SlotDescriptor
from tests.unit.builders import slot


def test_two_lives_of_a_pool_grant_different_slots() -> None:
    first, second = (ReceivePool("pool", 64, 64).take_slot(64) for _ in range(2))
    assert first != second


def test_giving_back_twice_or_elsewhere_is_refused() -> None:
    pool = ReceivePool("pool", 64, 64)
    taken = pool.take_slot(64)
    assert taken is not None
    pool.give_back(taken)
    with pytest.raises(ValueError, match="not in use"):
        pool.give_back(taken)
    with pytest.raises(ValueError, match="not in use"):
        pool.give_back(slot(1))
    with pytest.raises(ValueError, match="must be positive"):
        pool.take_slot(0)


def test_a_pool_without_room_for_one_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"transfer\.pool_bytes"):
        ReceivePool("pool", 63, 64)


class PoolAgainstModel(RuleBasedStateMachine):
    """No two slots overlap, everything that was given back can be had again."""

    CAPACITY, ALIGNMENT = 1024, 64

    def __init__(self) -> None:
        super().__init__()
        self.pool = ReceivePool("pool", self.CAPACITY + self.ALIGNMENT - 1, self.ALIGNMENT)
        self.out: list[SlotDescriptor] = []
        self.generations: set[int] = set()

    def occupied(self) -> list[bool]:
        """Return for every unit of the alignment whether a slot is there."""
        units = [False] * (self.CAPACITY // self.ALIGNMENT)
        for taken in self.out:
            first = taken.offset // self.ALIGNMENT
            for unit in range(first, first + -(-taken.nbytes // self.ALIGNMENT)):
                assert not units[unit], "two slots overlap"
                units[unit] = True
        return units

    @rule(nbytes=st.integers(1, CAPACITY + 1))
    def take(self, nbytes: int) -> None:
        need = -(-nbytes // self.ALIGNMENT)
        free_runs = "".join("x" if used else "." for used in self.occupied()).split("x")
        taken = self.pool.take_slot(nbytes)
        assert (taken is not None) == any(len(run) >= need for run in free_runs)
        if taken is not None:
            assert (taken.nbytes, taken.offset % self.ALIGNMENT) == (nbytes, 0)
            assert taken.generation not in self.generations
            self.generations.add(taken.generation)
            self.out.append(taken)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        taken = data.draw(st.sampled_from(self.out))
        self.out.remove(taken)
        self.pool.give_back(taken)

    @invariant()
    def free_bytes_are_what_no_slot_occupies(self) -> None:
        assert self.pool.free_bytes == self.occupied().count(False) * self.ALIGNMENT


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=40, deadline=None)
