"""The preallocator that the configuration names."""

from __future__ import annotations

from typing import Any

from epd_portable.scheduling.async_preallocator import AsyncEncoderCachePreallocator
from epd_portable.scheduling.encoder_cache import EncoderCacheManager
from epd_portable.scheduling.preallocator import EncoderCachePreallocator, SlotSource, SlotT
from epd_portable.scheduling.sync_preallocator import SyncEncoderCachePreallocator

PREALLOCATORS: dict[str, type[EncoderCachePreallocator[Any]]] = {
    "sync": SyncEncoderCachePreallocator,
    "async": AsyncEncoderCachePreallocator,
}
"""By the value of ``transfer.preallocation``."""


def make_preallocator(
    name: str, cache: EncoderCacheManager, slots: SlotSource[SlotT]
) -> EncoderCachePreallocator[SlotT]:
    """Return the preallocator of that name, a key of `PREALLOCATORS`."""
    return PREALLOCATORS[name](cache, slots)
