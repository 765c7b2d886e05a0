"""Room for items that other instances deliver: what every preallocator does.

Room in the encoder cache *and* a receive slot are taken together or not at all, for one *claim* an
item, however many requests await it. Claims of requests are served strictly first come, first
served: in the order of the requests' arrival and, within a request, of the prompt, up to the first
that does not fit. The request at the head therefore always gets room first, and two requests can
never block each other with half of what each needs.

The two preallocators differ in what they do with an item that is announced before any request
asks for it: `EncoderCachePreallocator.accept`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from epd_portable.scheduling.encoder_cache import EncoderCacheManager
from epd_portable.wire.descriptors import TensorSpec

SlotT = TypeVar("SlotT")


class SlotSource(Protocol[SlotT]):
    """A bounded supply of receive slots."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the whole supply."""
        ...

    def take(self, nbytes: int) -> SlotT | None:
        """Return a slot of at least ``nbytes``, or ``None`` when none is free."""
        ...

    def give_back(self, slot: SlotT) -> None:
        """Make a slot free again."""
        ...


@dataclass(slots=True)
class Claim(Generic[SlotT]):
    """An item that is to be delivered.

    Attributes:
        mm_hash: The item.
        num_embeds: Room in the encoder cache.
        tensor: What will be written into the slot.
        waiting: ``(request_id, input_id)`` pairs that need it; empty as long as no request asked.
        slot: Once reserved.
    """

    mm_hash: str
    num_embeds: int
    tensor: TensorSpec
    waiting: set[tuple[str, int]] = field(default_factory=set)
    slot: SlotT | None = None


class EncoderCachePreallocator(ABC, Generic[SlotT]):
    """Reserves encoder-cache room and slots for items that other instances deliver.

    Nothing here blocks or knows the time. What a call gives up comes back to the caller, who makes
    slots free when nobody can write or read them any more.

    Args:
        cache: The scheduler's encoder cache.
        slots: Where receive slots come from.
    """

    def __init__(self, cache: EncoderCacheManager, slots: SlotSource[SlotT]) -> None:
        self._cache = cache
        self._slots = slots
        self._claims: dict[str, Claim[SlotT]] = {}
        self._resident: dict[str, SlotT] = {}
        self._retiring = 0

    @abstractmethod
    def accept(self, mm_hash: str, num_embeds: int, tensor: TensorSpec) -> Claim[SlotT] | None:
        """Reserve room for an announced item that no request has asked for, if that is wanted.

        Args:
            mm_hash: The item; it has neither entry nor claim, see `knows`.
            num_embeds: Room in the encoder cache.
            tensor: What is announced.

        Returns:
            Its claim, with a slot and nobody waiting; ``None`` if it is to wait for its request.
        """

    def knows(self, mm_hash: str) -> bool:
        """Tell whether an item is here, on its way, or not yet forgotten by the workers."""
        return mm_hash in self._claims or mm_hash in self._cache or mm_hash in self._resident

    def fits_at_all(self, num_embeds: int, nbytes: int) -> bool:
        """Tell whether an item could ever be received by this instance."""
        return num_embeds <= self._cache.cache_size and nbytes <= self._slots.capacity_bytes

    def claim(
        self, request_id: str, input_id: int, *, mm_hash: str, num_embeds: int, tensor: TensorSpec
    ) -> None:
        """Queue an item that a request awaits; `reserve` gives it room.

        Of an item that was accepted before, the claim and its room become the request's, at the
        request's place in the queue.
        """
        claim = self._claims.get(mm_hash)
        if claim is None:
            claim = self._open(mm_hash, num_embeds, tensor)
        elif not claim.waiting:
            self._claims[mm_hash] = self._claims.pop(mm_hash)
        claim.waiting.add((request_id, input_id))

    def get(self, mm_hash: str) -> Claim[SlotT] | None:
        """Return the claim on an item, or ``None``."""
        return self._claims.get(mm_hash)

    def reserve(self) -> list[Claim[SlotT]]:
        """Reserve room for as many claims as fit, in order; return the newly reserved.

        Claims that a request waits for come first. When slots are short, an entry that occupies
        one and that nobody holds is evicted. Its slot comes back only after the workers forgot it
        (`retire`, `give_back`), so this is called again after everything that gives room back.
        """
        reserved = []
        asked = [claim for claim in self._claims.values() if claim.waiting]
        accepted = [claim for claim in self._claims.values() if not claim.waiting]
        for claim in asked + accepted:
            if claim.slot is None:
                if not self._reserve(claim):
                    break
                reserved.append(claim)
        return reserved

    @property
    def blocked(self) -> Claim[SlotT] | None:
        """The first claim of a request without room, if no room is about to come back."""
        if self._retiring:
            return None
        waiting = (claim for claim in self._claims.values() if claim.waiting and claim.slot is None)
        return next(waiting, None)

    def finalize(self, mm_hash: str) -> Claim[SlotT]:
        """The item is in its slot: make it an entry held by everybody who waits.

        Raises:
            KeyError: The item was not claimed or not reserved.
        """
        claim = self._claims[mm_hash]
        self._cache.finalize_allocation(mm_hash, claim.waiting)
        self._forget(claim)
        assert claim.slot is not None
        self._resident[mm_hash] = claim.slot
        return claim

    def retire(self, mm_hash: str) -> SlotT | None:
        """The item needs its slot no more; return it, for `give_back` once nobody reads it."""
        slot = self._resident.pop(mm_hash, None)
        if slot is not None:
            self._retiring += 1
        return slot

    def give_back(self, slots: Iterable[SlotT]) -> None:
        """Make retired slots free again."""
        for slot in slots:
            self._retiring -= 1
            self._slots.give_back(slot)

    def reopen(self, mm_hash: str) -> None:
        """The claim's slot was lost to a failed transfer: it queues for another, at its place."""
        claim = self._claims.get(mm_hash)
        if claim is not None and claim.slot is not None:
            claim.slot = None
            self._cache.depreallocate(mm_hash)

    def cancel(self, mm_hash: str) -> Claim[SlotT] | None:
        """Stop awaiting an item; returns its claim, whose slot the caller gives back when safe."""
        claim = self._claims.get(mm_hash)
        if claim is not None:
            self._cache.depreallocate(mm_hash)
            self._forget(claim)
        return claim

    def withdraw(self, request_id: str, mm_hashes: Iterable[str]) -> list[Claim[SlotT]]:
        """The request needs these items no more; return the claims that nobody needs now.

        Returned claims are cancelled: the caller gives their slots back when that is safe.
        """
        orphans = []
        for mm_hash in mm_hashes:
            claim = self._claims.get(mm_hash)
            if claim is None or not claim.waiting:
                continue
            claim.waiting = {pair for pair in claim.waiting if pair[0] != request_id}
            if not claim.waiting and self.cancel(mm_hash):
                orphans.append(claim)
        return orphans

    # -- for the two preallocators ---------------------------------------------------------------

    def _open(self, mm_hash: str, num_embeds: int, tensor: TensorSpec) -> Claim[SlotT]:
        claim: Claim[SlotT] = Claim(mm_hash, num_embeds, tensor)
        self._claims[mm_hash] = claim
        self._cache.await_item(mm_hash)
        return claim

    def _reserve(self, claim: Claim[SlotT]) -> bool:
        """Give a claim all it needs or nothing, and begin to make room where that is possible."""
        if claim.mm_hash in self._resident:  # the workers read its former slot
            return False
        if not self._cache.can_preallocate(claim.num_embeds):
            return False
        claim.slot = self._slots.take(claim.tensor.nbytes)
        if claim.slot is None:
            if not self._retiring:
                self._cache.evict_idle(self._resident)
            return False
        self._cache.preallocate(claim.mm_hash, claim.num_embeds)
        return True

    def _forget(self, claim: Claim[SlotT]) -> None:
        del self._claims[claim.mm_hash]
        self._cache.stop_awaiting(claim.mm_hash)
