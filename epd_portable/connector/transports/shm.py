"""``shm``: the producer copies into the consumer's pool in ``/dev/shm``."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from epd_portable.connector.pool import SharedMemory
from epd_portable.connector.transport import Clock, Transport, check_source
from epd_portable.errors import (
    LeaseExpiredError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
)
from epd_portable.wire.descriptors import SlotDescriptor

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 8 << 20
"""The lease is looked at between chunks; one chunk takes about a millisecond."""


class ShmTransport(Transport):
    """Maps each consumer's pool once and copies straight into it."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pools: dict[str, SharedMemory] = {}

    def write(
        self, src: torch.Tensor, slot: SlotDescriptor, *, address: str, deadline_s: float
    ) -> None:
        """See `Transport.write`.

        The slot names the pool's file, the address is its `SharedMemory.identity`: the pool of a
        consumer that has restarted is another one, whose slots were never granted here.
        """
        import torch

        check_source(src, slot)
        if self._clock() >= deadline_s:
            raise LeaseExpiredError(f"lease of slot {slot.generation} ended before the write")
        flat = src.view(-1).view(torch.uint8)
        target = self._pool(slot.pool, address).tensor(slot.offset, slot.nbytes)
        for start in range(0, slot.nbytes, CHUNK_BYTES):
            if start and self._clock() >= deadline_s:
                raise TransportTimeoutError(
                    f"{start} of {slot.nbytes} bytes written when the lease of slot "
                    f"{slot.generation} ended; raise transfer.lease_s"
                )
            target[start : start + CHUNK_BYTES].copy_(flat[start : start + CHUNK_BYTES])

    def close(self) -> None:
        """Drop all mappings."""
        with self._lock:
            self._pools.clear()

    def _pool(self, name: str, identity: str) -> SharedMemory:
        with self._lock:
            pool = self._pools.get(name)
            if pool is None or not pool.is_current():
                pool = self._pools[name] = self._open(name)
            if pool.identity != identity:
                raise PeerLostError(f"receive pool {name} was made anew: its owner has restarted")
            return pool

    def _open(self, name: str) -> SharedMemory:
        try:
            return SharedMemory.open(name)
        except FileNotFoundError as error:
            raise PeerLostError(f"receive pool {name} is gone with its owner") from error
        except OSError as error:
            raise TransportError(
                f"receive pool {name}: {error}; run both instances as the same user"
            ) from error
