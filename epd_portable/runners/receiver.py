"""PD scheduler: expects items, gives them room, and tells the scheduler what it may compute."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from epd_portable.connector import registry
from epd_portable.connector.consumer import ConsumerSession
from epd_portable.connector.endpoint import ConsumerEndpoint
from epd_portable.connector.events import Failed, Landed
from epd_portable.connector.pool import ReceivePool
from epd_portable.connector.transport import LeaseFence
from epd_portable.log import trace
from epd_portable.runners.placer import Placement
from epd_portable.runners.prompt import PromptItem, RequestRecord, match_transfers
from epd_portable.scheduling.encoder_cache import EncoderCacheManager, MultiModalRequest
from epd_portable.scheduling.preallocator import Claim, SyncEncoderCachePreallocator
from epd_portable.wire.descriptors import SlotDescriptor
from epd_portable.wire.messages import Nack, NackCode
from epd_portable.wire.params import ItemOutcome, PrefillOutcome, PrefillParams

if TYPE_CHECKING:
    from epd_portable.config.instance import InstanceConfig

logger = logging.getLogger(__name__)


class Receiver:
    """Everything that the PD instance's scheduler process does for items from elsewhere.

    Not for several threads: all calls come from the scheduler's.

    Args:
        config: Of this instance.
        fingerprint: What producers must agree with.
        cache: The scheduler's encoder cache.
        alignment_bytes: Of slots, see `PlatformTraits.slot_alignment_bytes`.
        copies: Whether workers copy items out of their slots (`PlatformTraits.needs_device_copy`).
            If not, a slot is kept as long as its item is in the encoder cache.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: InstanceConfig,
        *,
        fingerprint: str,
        cache: EncoderCacheManager,
        alignment_bytes: int,
        copies: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._cache = cache
        self._copies = copies
        self._clock = clock
        self._requests: dict[str, RequestRecord] = {}
        self._unavailable: set[str] = set()
        self._placements: list[Placement] = []
        self._retiring: deque[list[SlotDescriptor]] = deque()
        self._pool = ReceivePool(config.pool, config.pool_bytes, alignment_bytes)
        self._preallocator: SyncEncoderCachePreallocator[SlotDescriptor] = (
            SyncEncoderCachePreallocator(cache, self._pool)
        )
        fence = LeaseFence()
        self._endpoint = ConsumerEndpoint(
            config, fingerprint=fingerprint, pool_bytes=self._pool.capacity_bytes, fence=fence
        )
        self._session = ConsumerSession(
            choose=self._endpoint.choose,
            fingerprint=fingerprint,
            slot_for=self._slot_for,
            is_gone=self._endpoint.is_gone,
            fence=fence,
            fenced_paths=registry.fenced_paths(),
            wait_timeout_s=config.wait_timeout_s,
            lease_s=config.lease_s,
        )

    def request_arrived(
        self,
        request: MultiModalRequest,
        items: Sequence[PromptItem],
        params: PrefillParams | None,
    ) -> None:
        """A request with media was added to the scheduler.

        Items that are in the encoder cache are held for it; those with a transfer are expected;
        the rest is encoded here, unless another request already awaits the same item.
        """
        now = self._clock()
        transfers = match_transfers(items, params)
        reply_to = params.reply_to.encode() if params else b""
        record = RequestRecord(request, items, transfers, reply_to, now)
        self._requests[request.request_id] = record
        for item in items:
            transfer = transfers.get(item.mm_hash)
            if self._cache.check_and_update_cache(request, item.input_id):
                record.note(ItemOutcome(mm_hash=item.mm_hash, source="encoder_cache"))
                if transfer is not None:
                    self._session.decline(transfer.transfer_id)
                continue
            if transfer is None and self._preallocator.get(item.mm_hash) is None:
                continue
            if not self._preallocator.fits_at_all(item.num_embeds, item.tensor.nbytes):
                self._refuse(request.request_id, record, item)
                return
            self._preallocator.claim(
                request.request_id,
                item.input_id,
                mm_hash=item.mm_hash,
                num_embeds=item.num_embeds,
                nbytes=item.tensor.nbytes,
            )
            record.awaited.add(item.mm_hash)
            if transfer is not None:
                self._session.expect(transfer.transfer_id, item.mm_hash, item.tensor, now)
        awaited = [mm_hash for mm_hash in transfers if mm_hash in record.awaited]
        trace("request.arrived", request=request.request_id, awaited=awaited)

    def may_schedule(self, request_id: str, num_computed_tokens: int) -> bool:
        """Tell whether the next token of a request can be computed (or is worth trying).

        False only if that token belongs to an item that is still on its way, or that must be
        encoded here and has no room yet. Text before a missing item is never held up.

        Args:
            request_id: A request of this instance.
            num_computed_tokens: Tokens whose KV is there, prefix cache included.
        """
        record = self._requests.get(request_id)
        if record is None:
            return True
        if record.failed:
            return False
        self._drop_covered(request_id, record, num_computed_tokens)
        for item in record.items:
            if item.end <= num_computed_tokens or item.mm_hash in self._cache:
                continue
            if num_computed_tokens < item.begin:
                return True
            return item.mm_hash not in record.awaited and self._cache.can_preallocate(
                item.num_embeds
            )
        return True

    def encoding_here(self, request_id: str, mm_hash: str) -> None:
        """The scheduler has decided to encode an item on this instance."""
        record = self._requests.get(request_id)
        if record is not None:
            record.note(ItemOutcome(mm_hash=mm_hash, source="local"))
            trace("item.local", request=request_id, mm_hash=mm_hash)

    def request_finished(self, request_id: str) -> PrefillOutcome | None:
        """A request ended, well or not: whatever only it awaited is given up.

        Returns:
            How each of its items was had; ``None`` for a request without items.
        """
        record = self._requests.pop(request_id, None)
        if record is None:
            return None
        self._withdraw(request_id, record.awaited)
        items = {item.mm_hash: None for item in record.items}
        return PrefillOutcome(
            instance=self._config.instance,
            items=tuple(record.outcomes[key] for key in items if key in record.outcomes),
        )

    def tick(self) -> None:
        """Exchange messages and act on them; called before every step of the scheduler."""
        now = self._clock()
        for identity, message in self._endpoint.receive():
            self._session.receive(identity, message, now)
        for claim in self._preallocator.reserve():
            trace("item.reserved", mm_hash=claim.mm_hash, nbytes=claim.nbytes)
        blocked = self._preallocator.blocked
        if blocked is not None:
            self._make_way(blocked)
        messages, events = self._session.poll(now)
        for identity, message in messages:
            self._endpoint.send(identity, message)
        for event in events:
            if isinstance(event, Landed):
                self._landed(event, now)
            elif isinstance(event, Failed):
                self._failed(event)
            else:
                self._pool.give_back(event.slot)
        self._expire(now)

    def take_placements(self, freed: Iterable[str]) -> list[Placement]:
        """Return what the workers must place in the step that was just scheduled.

        Args:
            freed: Items that the workers forget in that step.
        """
        placements = [item for item in self._placements if item.mm_hash in self._cache]
        self._placements.clear()
        unused = list(freed)
        if self._copies:
            unused += [item.mm_hash for item in placements]
        slots = [self._preallocator.retire(mm_hash) for mm_hash in unused]
        self._retiring.append([slot for slot in slots if slot is not None])
        return placements

    def step_done(self) -> None:
        """The oldest step under way has ended: nobody reads what it made the workers forget."""
        if self._retiring:
            self._preallocator.give_back(self._retiring.popleft())

    def take_unavailable(self) -> set[str]:
        """Return requests that cannot be answered, for the scheduler to fail."""
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    def close(self) -> None:
        """Stop receiving and remove the pool."""
        self._endpoint.close()

    # --------------------------------------------------------------------------------------------

    def _make_way(self, claim: Claim[SlotDescriptor]) -> None:
        """Take an entry from requests that came later and hold it while they wait for more.

        They would wait for the claim in front of them, and the claim for their entry. They hold it
        again when they are scheduled, or encode the item here if it has gone by then.
        """
        arrived = list(self._requests)
        first = min(arrived.index(request_id) for request_id, _ in claim.waiting)
        later = frozenset(arrived[first + 1 :])
        for request_id in arrived[first + 1 :]:
            for item in self._requests[request_id].items:
                holders = self._cache.holders(item.mm_hash)
                if holders and holders <= later:
                    self._release(item.mm_hash, holders)
                    return

    def _release(self, mm_hash: str, holders: Iterable[str]) -> None:
        for request_id in holders:
            record = self._requests[request_id]
            for item in record.items:
                if item.mm_hash == mm_hash:
                    self._cache.free_encoder_input(record.request, item.input_id)

    def _slot_for(self, mm_hash: str) -> SlotDescriptor | None:
        claim = self._preallocator.get(mm_hash)
        return claim.slot if claim else None

    def _landed(self, event: Landed, now: float) -> None:
        claim = self._preallocator.finalize(event.mm_hash)
        assert claim.slot is not None
        self._placements.append(
            Placement(mm_hash=event.mm_hash, slot=claim.slot, tensor=event.tensor)
        )
        for request_id, _ in claim.waiting:
            record = self._requests[request_id]
            record.awaited.discard(event.mm_hash)
            outcome = ItemOutcome(
                mm_hash=event.mm_hash,
                source="transfer",
                encoder=event.producer.instance,
                path=event.path,
                nbytes=event.tensor.nbytes,
                wait_ms=round((now - record.arrived_s) * 1000, 3),
                transfer_ms=round(event.transfer_s * 1000, 3),
            )
            record.note(outcome)
        trace(
            "item.landed",
            mm_hash=event.mm_hash,
            transfer=event.transfer_id,
            path=event.path,
            nbytes=event.tensor.nbytes,
            transfer_s=event.transfer_s,
        )

    def _failed(self, event: Failed) -> None:
        logger.warning("item %s by transfer %s: %s", event.mm_hash, event.transfer_id, event.reason)
        trace("item.failed", mm_hash=event.mm_hash, transfer=event.transfer_id, reason=event.reason)
        if event.slot is not None:
            self._preallocator.reopen(event.mm_hash)
        if not event.last or self._session.expects(event.mm_hash):
            return
        claim = self._preallocator.cancel(event.mm_hash)
        if claim is not None:
            self._give_up(claim, event.code, event.reason)

    def _expire(self, now: float) -> None:
        """Give up items that a request awaits beyond its own deadline, by transfers of others."""
        wait_s = self._config.wait_timeout_s
        late = [record for record in self._requests.values() if now >= record.arrived_s + wait_s]
        for mm_hash in {mm_hash for record in late for mm_hash in record.awaited}:
            claim = self._preallocator.cancel(mm_hash)
            assert claim is not None
            reason = f"not delivered within {wait_s} s (transfer.wait_timeout_s)"
            logger.warning("item %s: %s", mm_hash, reason)
            self._give_up(claim, NackCode.UNAVAILABLE, reason)

    def _give_up(self, claim: Claim[SlotDescriptor], code: NackCode, reason: str) -> None:
        """Let everybody who awaits an item encode it here, or fail where that is impossible."""
        self._let_go(claim)
        for request_id, _ in claim.waiting:
            record = self._requests[request_id]
            record.awaited.discard(claim.mm_hash)
            if not self._config.can_encode:
                self._fail(request_id, record, claim.mm_hash, code, reason)

    def _let_go(self, claim: Claim[SlotDescriptor]) -> None:
        """End the transfers of a cancelled claim; its slot is free once nobody may write it."""
        granted = self._session.item_not_needed(claim.mm_hash)
        if claim.slot is not None and granted is None:
            self._pool.give_back(claim.slot)

    def _refuse(self, request_id: str, record: RequestRecord, item: PromptItem) -> None:
        self._withdraw(request_id, record.awaited)
        record.awaited.clear()
        for transfer in record.transfers.values():
            self._session.decline(transfer.transfer_id)
        detail = (
            f"an item of this request needs {item.num_embeds} encoder embeddings in "
            f"{item.tensor.nbytes} bytes; {self._config.instance} receives at most "
            f"{self._cache.cache_size} embeddings and {self._pool.capacity_bytes} bytes: "
            "send a smaller picture, or raise transfer.pool_bytes"
        )
        self._fail(request_id, record, item.mm_hash, NackCode.TOO_LARGE, detail)

    def _fail(
        self, request_id: str, record: RequestRecord, mm_hash: str, code: NackCode, detail: str
    ) -> None:
        """Let the scheduler end a request, and tell the router by one of its own transfers."""
        if record.failed:
            return
        record.failed = True
        self._unavailable.add(request_id)
        if record.reply_to and record.transfers:
            transfer = record.transfers.get(mm_hash) or next(iter(record.transfers.values()))
            nack = Nack(transfer_id=transfer.transfer_id, code=code, detail=detail)
            self._endpoint.send(record.reply_to, nack)

    def _drop_covered(
        self, request_id: str, record: RequestRecord, num_computed_tokens: int
    ) -> None:
        """Stop awaiting items that lie wholly in what is computed already."""
        if not record.awaited or not num_computed_tokens:
            return
        needed = {item.mm_hash for item in record.items if item.end > num_computed_tokens}
        covered = record.awaited - needed
        for mm_hash in covered:
            record.note(ItemOutcome(mm_hash=mm_hash, source="prefix_cache"))
        record.awaited -= covered
        self._withdraw(request_id, covered)

    def _withdraw(self, request_id: str, mm_hashes: Iterable[str]) -> None:
        for claim in self._preallocator.withdraw(request_id, mm_hashes):
            self._let_go(claim)
