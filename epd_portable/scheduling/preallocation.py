"""What becomes of an item that is announced before a request asks: ``transfer.preallocation``."""

from __future__ import annotations

from epd_portable.scheduling.items import Item
from epd_portable.scheduling.preallocator import EncoderCachePreallocator
from epd_portable.wire.descriptors import TensorSpec


class SyncEncoderCachePreallocator(EncoderCachePreallocator):
    """Gives room to what requests claim, and nothing else."""

    def accept(self, mm_hash: str, tensor: TensorSpec) -> Item | None:
        """Reserve nothing: the announcement waits for its request."""
        return None


class AsyncEncoderCachePreallocator(EncoderCachePreallocator):
    """Accepts items before any request has asked for them.

    An accepted item holds nobody up for good: none is accepted while a claim waits, what is
    accepted lands or ends at a deadline, and once landed it is evicted like every idle entry.
    """

    accepts_early = True

    def accept(self, mm_hash: str, tensor: TensorSpec) -> Item | None:
        """Reserve room unless a claim waits for some, or there is none."""
        if self.is_blocked or mm_hash in self.items or mm_hash in self._resident:
            return None
        item = Item(mm_hash, tensor.shape[0], tensor)
        self.items[mm_hash] = item
        if not self._reserve(item):
            del self.items[mm_hash]
            return None
        return item


PREALLOCATORS: dict[str, type[EncoderCachePreallocator]] = {
    "sync": SyncEncoderCachePreallocator,
    "async": AsyncEncoderCachePreallocator,
}
"""By the value of ``transfer.preallocation``."""
