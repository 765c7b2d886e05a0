"""PD scheduler: items that came by transfer, compared with what requests say that they are.

The engine knows an item by its ``mm_hash`` alone. An item that was accepted before its request is
described by its encoder only; when the request comes, the two descriptions must agree, or the bytes
are not used.
"""

from __future__ import annotations

from collections.abc import Iterable

from epd_portable.connector.consumer import ConsumerSession
from epd_portable.connector.events import Landed
from epd_portable.log import trace
from epd_portable.runners.prompt import PromptItem
from epd_portable.scheduling.encoder_cache import EncoderCacheManager
from epd_portable.scheduling.preallocator import Claim, EncoderCachePreallocator
from epd_portable.wire.descriptors import SlotDescriptor
from epd_portable.wire.params import ExpectedTransfer, ItemOutcome


class Arrivals:
    """Accepts announced items early, and knows what every item from elsewhere is.

    Args:
        cache: The scheduler's encoder cache.
        preallocator: Decides whether there is room for an item that nobody has asked for.
        session: Keeps the announcements.
    """

    def __init__(
        self,
        cache: EncoderCacheManager,
        preallocator: EncoderCachePreallocator[SlotDescriptor],
        session: ConsumerSession,
    ) -> None:
        self._cache = cache
        self._preallocator = preallocator
        self._session = session
        self._landed: dict[str, Landed] = {}

    def accept(self, now: float) -> None:
        """Accept announcements that came before their requests, in order, while there is room."""
        for announce in self._session.early():
            mm_hash, tensor = announce.mm_hash, announce.tensor
            num_embeds = tensor.shape[0]
            if self._preallocator.knows(mm_hash):
                continue
            if not self._preallocator.fits_at_all(num_embeds, tensor.nbytes):
                continue
            if self._preallocator.accept(mm_hash, num_embeds, tensor) is None:
                return
            self._session.expect(announce.transfer_id, mm_hash, tensor, now, asked=False)
            trace(
                "item.accepted",
                mm_hash=mm_hash,
                transfer=announce.transfer_id,
                nbytes=tensor.nbytes,
            )

    def landed(self, event: Landed) -> None:
        """An item is in the encoder cache by a transfer."""
        self._landed[event.mm_hash] = event

    def forget(self, mm_hashes: Iterable[str]) -> None:
        """These items are not in the encoder cache any more, or not by a transfer."""
        for mm_hash in mm_hashes:
            self._landed.pop(mm_hash, None)

    def outcome(self, mm_hash: str, transfer: ExpectedTransfer | None) -> ItemOutcome:
        """Return how a request has an item that was in the encoder cache when it came."""
        landed = self._landed.get(mm_hash)
        if landed is None or transfer is None or landed.transfer_id != transfer.transfer_id:
            return ItemOutcome(mm_hash=mm_hash, source="encoder_cache")
        return transferred(landed, wait_ms=0.0)

    def drop_others(self, item: PromptItem) -> Claim[SlotDescriptor] | None:
        """Give up what bears a request's item's name, is something else, and nobody uses.

        Returns:
            The claim of a transfer under way, cancelled; the caller ends its transfers.
        """
        landed = self._landed.get(item.mm_hash)
        if landed is not None and landed.tensor != item.tensor:
            self._cache.evict_idle({item.mm_hash})
        claim = self._preallocator.get(item.mm_hash)
        if claim is not None and not claim.waiting and claim.tensor != item.tensor:
            return self._preallocator.cancel(item.mm_hash)
        return None

    def conflict(self, item: PromptItem) -> str:
        """Return why a request cannot use the item of that name, which others use; empty if so."""
        landed = self._landed.get(item.mm_hash)
        if landed is not None and item.mm_hash in self._cache:
            here = landed.tensor
        else:
            claim = self._preallocator.get(item.mm_hash)
            here = item.tensor if claim is None else claim.tensor
        if here == item.tensor:
            return ""
        return (
            f"item {item.mm_hash} of this request is {item.tensor}, but requests before it use an "
            f"item of that name that is {here}: give different items different uuids"
        )


def transferred(event: Landed, *, wait_ms: float) -> ItemOutcome:
    """Return the report of an item that an encode instance wrote."""
    return ItemOutcome(
        mm_hash=event.mm_hash,
        source="transfer",
        encoder=event.producer.instance,
        path=event.path,
        nbytes=event.tensor.nbytes,
        wait_ms=wait_ms,
        transfer_ms=round(event.transfer_s * 1000, 3),
    )
