"""A preallocator between a small encoder cache and a small pool, worked by hand."""

from __future__ import annotations

from epd_portable.connector.pool import ReceivePool
from epd_portable.scheduling.choice import PREALLOCATORS, make_preallocator
from epd_portable.scheduling.encoder_cache import EncoderCacheManager
from epd_portable.scheduling.preallocator import Claim
from epd_portable.wire.descriptors import SlotDescriptor, TensorSpec
from tests.unit.builders import FakeRequest, request

KINDS = list(PREALLOCATORS)


def tensor(size: int) -> TensorSpec:
    """Return an output of ``size`` embeddings in as many bytes."""
    return TensorSpec(shape=(size, 1), dtype="float8_e5m2")


class Desk:
    """By default room for ten embeddings and ten bytes."""

    def __init__(self, kind: str, cache_embeds: int = 10, pool_bytes: int = 10) -> None:
        self.cache = EncoderCacheManager(cache_embeds)
        self.pool = ReceivePool("pool", pool_bytes, 1)
        self.preallocator = make_preallocator(kind, self.cache, self.pool)

    def claim(self, request_id: str, mm_hash: str, size: int, input_id: int = 0) -> None:
        self.preallocator.claim(
            request_id, input_id, mm_hash=mm_hash, num_embeds=size, tensor=tensor(size)
        )

    def accept(self, mm_hash: str, size: int) -> Claim[SlotDescriptor] | None:
        return self.preallocator.accept(mm_hash, size, tensor(size))

    def reserve(self) -> list[str]:
        return [claim.mm_hash for claim in self.preallocator.reserve()]

    def step(self) -> None:
        """Tell the workers what to forget, and end that step."""
        slots = [self.preallocator.retire(gone) for gone in self.cache.get_freed_mm_hashes()]
        self.preallocator.give_back(taken for taken in slots if taken is not None)

    def deliver(self, mm_hash: str, request_id: str) -> FakeRequest:
        """Land a claimed item; return the request that holds it."""
        size = self.preallocator.finalize(mm_hash).num_embeds
        return request(request_id, (mm_hash, size))

    def withdraw(self, request_id: str, mm_hash: str) -> None:
        """Let a request go; the slots that nobody needs are free at once."""
        for orphan in self.preallocator.withdraw(request_id, [mm_hash]):
            if orphan.slot is not None:
                self.pool.give_back(orphan.slot)

    def assert_everything_is_back(self) -> None:
        """Empty the cache; all room and every slot must be free then."""
        self.cache.reset()
        self.step()
        assert self.pool.free_bytes == self.pool.capacity_bytes
        assert self.cache.num_free_slots == self.cache.num_freeable_slots == self.cache.cache_size
