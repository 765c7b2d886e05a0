"""What paths of transfer libraries share: registered host memory, through which outputs pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from epd_portable.errors import TransportTimeoutError
from epd_portable.wire.descriptors import SlotDescriptor

_SMALLEST_BYTES = 1 << 20


@dataclass(frozen=True, eq=False, slots=True)
class RegisteredBuffer:
    """Host memory, and what the library returned for it."""

    memory: torch.Tensor
    registered: Any


class RegisteredBuffers:
    """Buffers for reuse, each of a power of two; for several threads.

    Args:
        register: Registers ``(nbytes,)`` uint8; returns what ``deregister`` takes.
        keep: Unused buffers that stay registered; the smallest goes first.
    """

    def __init__(
        self,
        register: Callable[[torch.Tensor], Any],
        deregister: Callable[[Any], None],
        *,
        keep: int,
    ) -> None:
        self._register = register
        self._deregister = deregister
        self._keep = keep
        self._lock = threading.Lock()
        self._free: list[RegisteredBuffer] = []
        """Smallest first."""

    def fill(self, data: torch.Tensor) -> RegisteredBuffer:
        """Return a buffer that begins with ``data``, which is ``(nbytes,)`` uint8 on the host."""
        buffer = self._take(data.numel())
        buffer.memory[: data.numel()].copy_(data)
        return buffer

    def give_back(self, buffer: RegisteredBuffer) -> None:
        """Keep a buffer that the library does not read any more for the next output."""
        with self._lock:
            self._free.append(buffer)
            self._free.sort(key=lambda each: each.memory.numel())
            surplus = self._free.pop(0) if len(self._free) > self._keep else None
        if surplus is not None:
            self.discard(surplus)

    def discard(self, buffer: RegisteredBuffer) -> None:
        """Deregister a buffer."""
        self._deregister(buffer.registered)

    def close(self) -> None:
        """Deregister all unused buffers."""
        with self._lock:
            while self._free:
                self.discard(self._free.pop())

    def _take(self, nbytes: int) -> RegisteredBuffer:
        with self._lock:
            for index, buffer in enumerate(self._free):
                if buffer.memory.numel() >= nbytes:
                    return self._free.pop(index)
        size = max(_SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
        memory = torch.empty(size, dtype=torch.uint8)
        return RegisteredBuffer(memory, self._register(memory))


def late_write(slot: SlotDescriptor, library: str) -> TransportTimeoutError:
    """Return the error for what a library has not written when the lease of a slot has ended."""
    return TransportTimeoutError(
        f"slot {slot.generation} was not written by {library} before its lease ended; the instance "
        "is gone or overloaded, or transfer.lease_s is too short"
    )
