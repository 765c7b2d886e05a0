"""PD worker: from receive slots into the engine's encoder cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epd_portable.connector.pool import SharedMemory
from epd_portable.errors import PlatformError
from epd_portable.log import trace
from epd_portable.wire.descriptors import SlotDescriptor, TensorSpec

if TYPE_CHECKING:
    import torch

    from epd_portable.platforms.base import Platform

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """One item to place in this step.

    Attributes:
        mm_hash: Key in the encoder cache.
        slot: Where its bytes are.
        tensor: What they are.
    """

    mm_hash: str
    slot: SlotDescriptor
    tensor: TensorSpec


class Placer:
    """Places items; on platforms that compute in host memory the tensor is a view of the slot.

    Args:
        platform: Of the worker.
        device: Of the worker.
    """

    def __init__(self, platform: Platform, device: torch.device) -> None:
        self._platform = platform
        self._device = device
        self._memory: SharedMemory | None = None

    def place(self, placements: list[Placement], encoder_cache: dict[str, torch.Tensor]) -> None:
        """Make the items entries of ``encoder_cache``.

        A copy to the device is queued on the current stream, before the model's own work.
        """
        import torch

        for item in placements:
            memory = self._pool(item.slot.pool)
            flat = memory.tensor(item.slot.offset, item.slot.nbytes)
            host = flat.view(getattr(torch, item.tensor.dtype)).view(item.tensor.shape)
            if self._platform.traits.needs_device_copy:
                encoder_cache[item.mm_hash] = host.to(self._device, non_blocking=True)
            else:
                encoder_cache[item.mm_hash] = host
            trace("item.placed", mm_hash=item.mm_hash, nbytes=item.slot.nbytes)

    def _pool(self, name: str) -> SharedMemory:
        if self._memory is None:
            self._memory = SharedMemory.open(name)
            if self._platform.traits.needs_device_copy:
                self._pin(self._memory)
        return self._memory

    def _pin(self, memory: SharedMemory) -> None:
        try:
            self._platform.pin_host(memory.tensor(0, memory.nbytes).data_ptr(), memory.nbytes)
        except PlatformError as error:
            logger.warning(
                "receive pool %s is not page-locked, copies from it block: %s", memory.path, error
            )
