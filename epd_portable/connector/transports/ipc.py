"""``ipc``: from the producer's device straight into the consumer's, on one host.

CUDA IPC and its Ascend counterpart, through `Platform.open_tensor`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from epd_portable.connector.copies import DeviceCopies, QueuedCopy
from epd_portable.connector.slab import OpenedSlab
from epd_portable.connector.transport import Transport, check_source
from epd_portable.log import trace
from epd_portable.wire.descriptors import SlotDescriptor

if TYPE_CHECKING:
    import torch

    from epd_portable.connector.curve import CurveKeys
    from epd_portable.platforms.base import DeviceEvent


class IpcTransport(Transport):
    """Opens each consumer's slab once and copies straight into it."""

    def __init__(self, copies: DeviceCopies, keys: CurveKeys) -> None:
        super().__init__(copies, keys)
        self._lock = threading.Lock()
        self._slabs: dict[str, OpenedSlab] = {}

    def write(
        self,
        src: torch.Tensor,
        slot: SlotDescriptor,
        *,
        computed: DeviceEvent,
        address: str,
        deadline_s: float,
    ) -> None:
        """See `Transport.write`; the address is that of the consumer's slab."""
        check_source(src, slot, self._copies.device)
        target = self._slab(address).tensor(slot.offset, slot.nbytes)
        self._copies.write(target, src, after=computed, deadline_s=deadline_s)

    def queue(
        self,
        src: torch.Tensor,
        slot: SlotDescriptor,
        *,
        computed: DeviceEvent,
        address: str,
        deadline_s: float,
    ) -> QueuedCopy | None:
        """See `Transport.queue`; the first write to a consumer opens its slab, which takes long."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            slab = self._slabs.get(address)
        finally:
            self._lock.release()
        if slab is None or slab.is_gone:
            return None
        check_source(src, slot, self._copies.device)
        target = slab.tensor(slot.offset, slot.nbytes)
        return self._copies.queue(target, src, after=computed, deadline_s=deadline_s)

    def close(self) -> None:
        """Let go of all slabs."""
        with self._lock:
            self._slabs.clear()

    def _slab(self, address: str) -> OpenedSlab:
        with self._lock:
            for gone in [key for key, slab in self._slabs.items() if slab.is_gone]:
                del self._slabs[gone]
            if address not in self._slabs:
                self._slabs[address] = OpenedSlab(self._copies.platform, address)
                trace("path.opened", path="ipc", address=address)
            return self._slabs[address]
