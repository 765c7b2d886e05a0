"""The consumer's receive pool, handed out in slots; its memory is elsewhere."""

from __future__ import annotations

import secrets

from epd_portable.errors import ConfigError
from epd_portable.wire.descriptors import SlotDescriptor


class ReceivePool:
    """Hands out slots of a fixed range of bytes, first fit.

    A slot's ``nbytes`` is what was asked for; it begins at a multiple of the alignment and occupies
    one. Every slot has its own generation, counted from a random number, so that a grant from
    before a restart is not taken for a new one.
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
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)]
        self._used: dict[int, tuple[int, int]] = {}
        self._generation = secrets.randbits(40) << 20

    @property
    def free_bytes(self) -> int:
        """Bytes in no slot, in one piece or several."""
        return sum(size for _, size in self._free)

    def take_slot(self, nbytes: int) -> SlotDescriptor | None:
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
            self._used[self._generation] = (offset, size)
            return SlotDescriptor(
                pool=self.name, offset=offset, nbytes=nbytes, generation=self._generation
            )
        return None

    def give_back(self, slot: SlotDescriptor) -> None:
        """Make a slot's range free again; `ValueError` if it is not in use here."""
        if slot.pool != self.name or slot.generation not in self._used:
            raise ValueError(f"slot {slot.generation} of pool {slot.pool} is not in use here")
        self._free.append(self._used.pop(slot.generation))
        self._free.sort()
        merged: list[tuple[int, int]] = []
        for offset, size in self._free:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free = merged
