"""Room for announced items at once, as long as no request waits for room."""

from __future__ import annotations

from epd_portable.scheduling.preallocator import Claim, EncoderCachePreallocator, SlotT
from epd_portable.wire.descriptors import TensorSpec


class AsyncEncoderCachePreallocator(EncoderCachePreallocator[SlotT]):
    """Accepts items before any request has asked for them.

    An accepted item is a claim that nobody waits for. It becomes the claim of the first request
    that asks, or an idle entry when it has landed. It cannot hold up a request for good: nothing
    is accepted while a claim lacks room, what is accepted needs nothing more to land or to expire,
    and once landed and not asked for it is evicted like every idle entry.
    """

    def accept(self, mm_hash: str, num_embeds: int, tensor: TensorSpec) -> Claim[SlotT] | None:
        """Reserve room unless a claim waits for some, or the item could never fit."""
        if any(claim.slot is None for claim in self._claims.values()):
            return None
        if not self.fits_at_all(num_embeds, tensor.nbytes):
            return None
        claim = self._open(mm_hash, num_embeds, tensor)
        if not self._reserve(claim):
            self._forget(claim)
            return None
        return claim
