"""``shm``: the producer copies into the consumer's pool in ``/dev/shm``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from epd_portable.connector.copies import DeviceCopies
from epd_portable.connector.pool import SharedMemory
from epd_portable.connector.transport import Transport, check_source
from epd_portable.errors import PeerLostError, TransportError
from epd_portable.log import trace
from epd_portable.wire.descriptors import SlotDescriptor

if TYPE_CHECKING:
    import torch

    from epd_portable.connector.curve import CurveKeys
    from epd_portable.platforms.base import DeviceEvent


class ShmTransport(Transport):
    """Maps each consumer's pool once and copies straight into it, from a device in one copy."""

    def __init__(self, copies: DeviceCopies, keys: CurveKeys) -> None:
        super().__init__(copies, keys)
        self._lock = threading.Lock()
        self._pools: dict[str, SharedMemory] = {}

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

        The slot names the pool's file, the address is its `SharedMemory.identity`: the pool of a
        consumer that has restarted is another one, whose slots were never granted here.
        """
        check_source(src, slot, self._copies.device)
        target = self._pool(slot.pool, address).tensor(slot.offset, slot.nbytes)
        self._copies.write(target, src, after=computed, deadline_s=deadline_s)

    def close(self) -> None:
        """Drop all mappings."""
        with self._lock:
            for pool in self._pools.values():
                self._copies.unpin(pool)
            self._pools.clear()

    def _pool(self, name: str, identity: str) -> SharedMemory:
        with self._lock:
            pool = self._pools.get(name)
            if pool is None or not pool.is_current():
                # A mapping would keep the memory of a pool whose owner has gone.
                gone = [known for known, each in self._pools.items() if not each.is_current()]
                for known in gone:
                    self._copies.unpin(self._pools.pop(known))
                pool = self._pools[name] = self._open(name)
            if pool.identity != identity:
                raise PeerLostError(f"receive pool {name} was made anew: its owner has restarted")
            return pool

    def _open(self, name: str) -> SharedMemory:
        try:
            pool = SharedMemory.open(name)
        except FileNotFoundError as error:
            raise PeerLostError(f"receive pool {name} is gone with its owner") from error
        except (OSError, ValueError) as error:
            raise TransportError(
                f"receive pool {name!r}: {error}; run both instances as the same user"
            ) from error
        self._copies.pin(pool)
        trace("path.opened", path="shm", address=name)
        return pool
