"""The receive pool of a prefill+decode engine, handed out in slots; its memory is elsewhere.

A slot has one state from its reservation until its bytes are free again::

    RESERVED ──▶ LEASED ──▶ RESIDENT ──▶ RETIRING ──▶ (free)
        │           │                        ▲
        ▼           └──▶ QUARANTINED ────────┘
      (free)
"""

from __future__ import annotations

import enum
import secrets
from dataclasses import dataclass

from epd_portable.errors import ConfigError
from epd_portable.wire.descriptors import SlotDescriptor


class SlotState(enum.Enum):
    """Use of a slot; one that is free does not exist."""

    RESERVED = enum.auto()
    """Slot of an item that no encoder may write yet."""
    LEASED = enum.auto()
    """An encoder may write it."""
    QUARANTINED = enum.auto()
    """Slot whose grant failed, and that the encoder may still write."""
    RESIDENT = enum.auto()
    """Written; workers may read it."""
    RETIRING = enum.auto()
    """Free at the end of the step that passes this on to the workers."""


_NEXT = {
    SlotState.RESERVED: {SlotState.LEASED},
    SlotState.LEASED: {SlotState.RESIDENT, SlotState.QUARANTINED},
    SlotState.QUARANTINED: {SlotState.RETIRING},
    SlotState.RESIDENT: {SlotState.RETIRING},
    SlotState.RETIRING: set(),
}
_CAN_BE_FREED = (SlotState.RESERVED, SlotState.RETIRING)


@dataclass(slots=True, eq=False)
class Slot:
    """A range of the receive pool that is not free.

    Attributes:
        mm_hash: Name of the item for which it was reserved.
        size: Bytes that it occupies, in units of the alignment.
        step: Number of the step whose end frees it; ``None`` before it is passed to a step.
    """

    descriptor: SlotDescriptor
    mm_hash: str
    size: int
    state: SlotState = SlotState.RESERVED
    step: int | None = None


class ReceivePool:
    """Hands out slots of a fixed range of bytes, first fit.

    A slot's ``nbytes`` is the requested number; it begins at a multiple of the alignment and
    occupies one. Every slot has its own generation, counted from a random number, so that a grant
    from before a restart is not taken for a new one.

    Attributes:
        slots: Those that are not free, by generation.
        resident: Those that workers may read, by the name of their item.
        retiring: Those that are about to be free.
    """

    def __init__(self, name: str, capacity_bytes: int, alignment_bytes: int) -> None:
        self.name = name
        self.alignment_bytes = alignment_bytes
        self.capacity_bytes = capacity_bytes // alignment_bytes * alignment_bytes
        if self.capacity_bytes <= 0:
            raise ConfigError(
                f"receive pool of {capacity_bytes} bytes: at least {alignment_bytes} are needed; "
                "raise transfer.pool_bytes"
            )
        self.slots: dict[int, Slot] = {}
        self.resident: dict[str, Slot] = {}
        self.retiring: list[Slot] = []
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)]
        self._generation = secrets.randbits(40) << 20

    @property
    def free_bytes(self) -> int:
        """Bytes in no slot, in one piece or several."""
        return sum(size for _, size in self._free)

    def reserve(self, nbytes: int, mm_hash: str = "") -> Slot | None:
        """Return a slot for ``nbytes``, or ``None`` when no free range is long enough."""
        if nbytes <= 0:
            raise ValueError(f"slot of {nbytes} bytes: must be positive")
        size = -(-nbytes // self.alignment_bytes) * self.alignment_bytes
        for index, (offset, free) in enumerate(self._free):
            if free < size:
                continue
            if free == size:
                del self._free[index]
            else:
                self._free[index] = (offset + size, free - size)
            self._generation += 1
            descriptor = SlotDescriptor(
                pool=self.name, offset=offset, nbytes=nbytes, generation=self._generation
            )
            slot = self.slots[self._generation] = Slot(descriptor, mm_hash, size)
            return slot
        return None

    def move(self, slot: Slot, state: SlotState) -> None:
        """Change the use of a slot, as the diagram allows."""
        assert state in _NEXT[slot.state], f"slot {slot.state.name} to {state.name}"
        if slot.state is SlotState.RESIDENT:
            del self.resident[slot.mm_hash]
        slot.state = state
        if state is SlotState.RESIDENT:
            assert slot.mm_hash not in self.resident, "workers may still read the former slot"
            self.resident[slot.mm_hash] = slot
        elif state is SlotState.RETIRING:
            self.retiring.append(slot)

    def pass_on(self, step: int) -> list[Slot]:
        """Return slots that retire since the last call: the end of this step frees them."""
        passed = [each for each in self.retiring if each.step is None]
        for slot in passed:
            slot.step = step
        return passed

    def step_ended(self, step: int) -> bool:
        """Free slots that were passed to this step or one before; return whether there were any."""
        if not self.retiring:
            return False
        left = [each for each in self.retiring if each.step is None or each.step > step]
        ended = [each for each in self.retiring if each not in left]
        self.retiring = left
        for slot in ended:
            self.free(slot)
        return bool(ended)

    def free(self, slot: Slot) -> None:
        """Make a slot's range free again; `ValueError` if it is not in use here."""
        if self.slots.get(slot.descriptor.generation) is not slot:
            raise ValueError(f"slot {slot.descriptor.generation} is not in use in {self.name}")
        assert slot.state in _CAN_BE_FREED, f"slot {slot.state.name} cannot be freed"
        del self.slots[slot.descriptor.generation]
        self._free.append((slot.descriptor.offset, slot.size))
        self._free.sort()
        merged: list[tuple[int, int]] = []
        for offset, size in self._free:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free = merged
