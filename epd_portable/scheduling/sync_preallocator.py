"""Room for requests only: an item that no request has asked for waits outside."""

from __future__ import annotations

from epd_portable.scheduling.preallocator import Claim, EncoderCachePreallocator, SlotT
from epd_portable.wire.descriptors import TensorSpec


class SyncEncoderCachePreallocator(EncoderCachePreallocator[SlotT]):
    """Reserves room for items that requests await, strictly in the order of their arrival."""

    def accept(self, mm_hash: str, num_embeds: int, tensor: TensorSpec) -> Claim[SlotT] | None:
        """Reserve nothing: the announcement waits for its request."""
        return None
