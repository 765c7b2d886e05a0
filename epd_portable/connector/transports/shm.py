"""``shm``: the producer copies into the consumer's pool in ``/dev/shm``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from epd_portable.connector.copies import DeviceCopies, QueuedCopy
from epd_portable.connector.pool import SharedMemory
from epd_portable.connector.transport import Transport, check_source
from epd_portable.errors import PeerLostError, TransportError
from epd_portable.log import trace
from epd_portable.wire.descriptors import SlotDescriptor

if TYPE_CHECKING:
    import torch

    from epd_portable.connector.curve import CurveKeys
    from epd_portable.platforms.base import DeviceEvent


@dataclass(eq=False, slots=True)
class _Pool:
    memory: SharedMemory
    copies_block: bool
    users: set[object] = field(default_factory=set)
    """Writes under way; meanwhile it stays page-locked."""

    def use(self) -> Callable[[], None]:
        """Register a write; return what ends it."""
        user = object()
        self.users.add(user)
        return partial(self.users.discard, user)


class ShmTransport(Transport):
    """Maps each consumer's pool once and copies straight into it, from a device in one copy."""

    def __init__(self, copies: DeviceCopies, keys: CurveKeys) -> None:
        super().__init__(copies, keys)
        self._lock = threading.Lock()
        self._pools: dict[tuple[str, str], _Pool] = {}
        """By name and identity."""

    def write(
        self,
        src: torch.Tensor,
        slot: SlotDescriptor,
        *,
        computed: DeviceEvent,
        address: str,
        deadline_s: float,
    ) -> None:
        """See `Transport.write`.

        The slot names the pool's file, the address is its `SharedMemory.identity`, which differs
        after a restart of the consumer.
        """
        check_source(src, slot, self._copies.device)
        with self._lock:
            pool = self._pool(slot.pool, address)
            ended = pool.use()
        try:
            target = pool.memory.tensor(slot.offset, slot.nbytes)
            self._copies.write(target, src, after=computed, deadline_s=deadline_s)
        finally:
            ended()

    def queue(
        self,
        src: torch.Tensor,
        slot: SlotDescriptor,
        *,
        computed: DeviceEvent,
        address: str,
        deadline_s: float,
    ) -> QueuedCopy | None:
        """See `Transport.queue`; the first write to a consumer maps its pool and page-locks it."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            pool = self._pools.get((slot.pool, address))
            if pool is None or pool.copies_block or not pool.memory.is_current():
                return None
            ended = pool.use()
        finally:
            self._lock.release()
        try:
            check_source(src, slot, self._copies.device)
            target = pool.memory.tensor(slot.offset, slot.nbytes)
            return self._copies.queue(
                target, src, after=computed, deadline_s=deadline_s, ended=ended
            )
        except BaseException:
            ended()
            raise

    def close(self) -> None:
        """Drop all mappings."""
        with self._lock:
            for pool in self._pools.values():
                self._copies.unpin(pool.memory)
            self._pools.clear()

    def _pool(self, name: str, identity: str) -> _Pool:
        pool = self._pools.get((name, identity))
        if pool is None or not pool.memory.is_current():
            # A mapping would keep the memory of a pool whose owner has gone.
            for gone in [key for key, each in self._pools.items() if _is_over(each)]:
                self._copies.unpin(self._pools.pop(gone).memory)
            memory = self._open(name)
            if memory.identity != identity:
                raise PeerLostError(f"receive pool {name} was made anew: its owner has restarted")
            pool = _Pool(memory, copies_block=not self._copies.pin(memory))
            self._pools[name, identity] = pool
            trace("path.opened", path="shm", address=name)
        return pool

    def _open(self, name: str) -> SharedMemory:
        try:
            return SharedMemory.open(name)
        except FileNotFoundError as error:
            raise PeerLostError(f"receive pool {name} is gone with its owner") from error
        except (OSError, ValueError) as error:
            raise TransportError(
                f"receive pool {name!r}: {error}; run both instances as the same user"
            ) from error


def _is_over(pool: _Pool) -> bool:
    return not pool.users and not pool.memory.is_current()
