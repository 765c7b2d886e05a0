from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_portable.connector.pool import ReceivePool, SharedMemory
from epd_portable.errors import CapacityError, ConfigError
from epd_portable.wire.descriptors import SlotDescriptor
from tests.receiving import pool_name, shared_memory
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


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with shared_memory(4096) as made:
        yield made


def test_two_mappings_show_the_same_bytes(memory: SharedMemory) -> None:
    other = SharedMemory.open(memory.path.name)
    other.tensor(64, 3).copy_(torch.tensor([1, 2, 3], dtype=torch.uint8))
    assert memory.tensor(63, 5).tolist() == [0, 1, 2, 3, 0]


def test_only_the_owner_may_read_the_pool(memory: SharedMemory) -> None:
    assert memory.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 0), (0, 4097), (4096, 1)])
def test_a_range_outside_is_refused(memory: SharedMemory, offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        memory.tensor(offset, nbytes)


def test_a_file_made_anew_is_another_pool(memory: SharedMemory) -> None:
    view = memory.tensor(0, 4)
    assert memory.is_current()
    anew = SharedMemory.create(memory.path.name, 4096)
    assert not memory.is_current()
    assert anew.identity != memory.identity
    anew.tensor(0, 4).fill_(7)
    assert view.tolist() == [0, 0, 0, 0]


def test_a_removed_file_is_not_current_and_cannot_be_opened(memory: SharedMemory) -> None:
    memory.unlink()
    memory.unlink()
    assert not memory.is_current()
    with pytest.raises(FileNotFoundError):
        SharedMemory.open(memory.path.name)


def test_a_pool_larger_than_the_machine_says_how_much_is_free_and_leaves_nothing() -> None:
    name = pool_name()
    with pytest.raises(CapacityError, match=r"free; lower transfer\.pool_bytes"):
        SharedMemory.create(name, 1 << 55)
    with pytest.raises(FileNotFoundError):
        SharedMemory.open(name)


NO_NAMES = ["", ".", "..", "epd-", "../etc/passwd", "epd-../../tmp/x", "epd-a/b", "epd-a\0b", "x"]


@pytest.mark.parametrize("name", [*NO_NAMES, "epd-" + "a" * 300, "epd-a\n", "\ud800"])
def test_a_name_that_leads_elsewhere_is_no_name_of_a_pool(name: str) -> None:
    """A consumer names the pool, and the producer writes there."""
    for use in (SharedMemory.open, lambda name: SharedMemory.create(name, 4096)):
        with pytest.raises(ValueError, match="no name of a receive pool"):
            use(name)


def test_only_a_private_file_is_a_pool(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = memory.path.name
    memory.path.chmod(0o666)
    with pytest.raises(PermissionError, match="-rw-rw-rw- of user"):
        SharedMemory.open(name)
    memory.path.chmod(0o600)
    with monkeypatch.context() as another:
        another.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(PermissionError, match="not a file of user 4711"):
            SharedMemory.open(name)
    assert SharedMemory.open(name).identity == memory.identity


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_no_pool(kind: str, memory: SharedMemory) -> None:
    path = memory.path.with_name(f"{memory.path.name}-{kind}")
    if kind == "link":
        path.symlink_to(memory.path)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir()
    try:
        with pytest.raises(OSError):
            SharedMemory.open(path.name)
        if kind == "folder":
            with pytest.raises(ConfigError, match="remove what has that name"):
                SharedMemory.create(path.name, 4096)
    finally:
        path.rmdir() if kind == "folder" else path.unlink()


def test_a_name_taken_late_is_not_used(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.tensor(0, 4).fill_(7)
    with monkeypatch.context() as squatter:
        squatter.setattr(Path, "unlink", lambda path, missing_ok: None)
        with pytest.raises(ConfigError, match="look who put it there"):
            SharedMemory.create(memory.path.name, 8192)
    assert memory.path.stat().st_size == 4096
    assert memory.tensor(0, 4).eq(7).all()
