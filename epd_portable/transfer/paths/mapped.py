"""``shm`` and ``ipc``: the producer copies into memory of a consumer on the same host.

``shm`` maps the consumer's pool in ``/dev/shm``. ``ipc`` opens its slab, by CUDA IPC or its Ascend
counterpart, so that bytes go from device to device.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from epd_portable.errors import PeerLostError, TransportError
from epd_portable.log import trace
from epd_portable.transfer.copies import DeviceCopies, QueuedCopy
from epd_portable.transfer.paths.base import PathWriter, SlotWrite, check_source
from epd_portable.transfer.pool import SharedMemory
from epd_portable.transfer.slab import OpenedSlab

if TYPE_CHECKING:
    from epd_portable.transfer.curve import CurveKeys

MemoryT = TypeVar("MemoryT", SharedMemory, OpenedSlab)


@dataclass(eq=False, slots=True)
class _Mapping(Generic[MemoryT]):
    memory: MemoryT
    copies_block: bool
    writes: set[object] = field(default_factory=set)
    """Writes under way; meanwhile the mapping is not closed."""

    def begin_write(self) -> Callable[[], None]:
        """Register a write; return what ends it."""
        write = object()
        self.writes.add(write)
        return partial(self.writes.discard, write)


class MappedWriter(PathWriter, Generic[MemoryT]):
    """Maps each consumer's memory at the first write to it, and copies straight into it."""

    _path: str

    def __init__(self, copies: DeviceCopies, keys: CurveKeys) -> None:
        super().__init__(copies, keys)
        self._lock = threading.Lock()
        self._mappings: dict[tuple[str, str], _Mapping[MemoryT]] = {}
        """Mappings by pool and address, which differs after a restart of the consumer."""

    @abstractmethod
    def _map(self, pool: str, address: str) -> tuple[MemoryT, bool]:
        """Map a consumer's memory; return it, and whether copies into it block the caller."""

    @abstractmethod
    def _is_gone(self, memory: MemoryT) -> bool:
        """Return whether the consumer that this memory belongs to has ended."""

    def _unmap(self, memory: MemoryT) -> None:
        """Undo `_map`."""

    def write(self, item: SlotWrite) -> None:
        """See `PathWriter.write`."""
        self._check(item)
        with self._lock:
            mapping = self._mapping(item.slot.pool, item.address)
            ended = mapping.begin_write()
        try:
            target = mapping.memory.tensor(item.slot.offset, item.slot.nbytes)
            self.copies.write(target, item.src, after=item.computed, deadline_s=item.deadline_s)
        finally:
            ended()

    def queue(self, item: SlotWrite) -> QueuedCopy | None:
        """See `PathWriter.queue`; the first write to a consumer takes long, as it maps memory."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            mapping = self._mappings.get((item.slot.pool, item.address))
            if mapping is None or mapping.copies_block or self._is_gone(mapping.memory):
                return None
            ended = mapping.begin_write()
        finally:
            self._lock.release()
        try:
            check_source(item.src, item.slot, self.copies.device)
            target = mapping.memory.tensor(item.slot.offset, item.slot.nbytes)
            return self.copies.queue(
                target, item.src, after=item.computed, deadline_s=item.deadline_s, ended=ended
            )
        except BaseException:
            ended()
            raise

    def close(self) -> None:
        """Drop all mappings."""
        with self._lock:
            for mapping in self._mappings.values():
                self._unmap(mapping.memory)
            self._mappings.clear()

    def _mapping(self, pool: str, address: str) -> _Mapping[MemoryT]:
        mapping = self._mappings.get((pool, address))
        if mapping is None or self._is_gone(mapping.memory):
            # A mapping would keep the memory of a consumer that has gone.
            for key, each in list(self._mappings.items()):
                if not each.writes and self._is_gone(each.memory):
                    self._unmap(self._mappings.pop(key).memory)
            mapping = self._mappings[pool, address] = _Mapping(*self._map(pool, address))
            trace("path.opened", path=self._path, address=pool)
        return mapping


class ShmWriter(MappedWriter[SharedMemory]):
    """Copies into a pool, from a device in one copy; the address is `SharedMemory.identity`."""

    _path = "shm"

    def _map(self, pool: str, address: str) -> tuple[SharedMemory, bool]:
        try:
            memory = SharedMemory.open(pool)
        except FileNotFoundError as error:
            raise PeerLostError(f"receive pool {pool} is gone with its owner") from error
        except (OSError, ValueError) as error:
            raise TransportError(
                f"receive pool {pool!r}: {error}; run both instances as the same user"
            ) from error
        if memory.identity != address:
            raise PeerLostError(f"receive pool {pool} was made again: its owner has restarted")
        return memory, not self.copies.pin(memory)

    def _is_gone(self, memory: SharedMemory) -> bool:
        return not memory.is_current()

    def _unmap(self, memory: SharedMemory) -> None:
        self.copies.unpin(memory)


class IpcWriter(MappedWriter[OpenedSlab]):
    """Copies into a slab; the address is `DeviceSlab.address`."""

    _path = "ipc"

    def _map(self, pool: str, address: str) -> tuple[OpenedSlab, bool]:
        return OpenedSlab(self.copies.platform, address), False

    def _is_gone(self, memory: OpenedSlab) -> bool:
        return memory.is_gone
