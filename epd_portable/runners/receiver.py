"""PD scheduler: expects items, gives them room, and tells the scheduler what it may compute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from epd_portable.connector import registry
from epd_portable.connector.consumer import ConsumerSession
from epd_portable.connector.endpoint import ConsumerEndpoint
from epd_portable.connector.events import Failed, Landed, Refused
from epd_portable.connector.pool import ReceivePool
from epd_portable.connector.transport import LeaseFence
from epd_portable.log import trace
from epd_portable.runners.arrivals import Arrivals, transferred
from epd_portable.runners.orders import OrderBook
from epd_portable.runners.placer import Placement, WorkerOrders
from epd_portable.runners.precedence import make_way
from epd_portable.runners.prompt import PromptItem, RequestRecord, bare_items, match_transfers
from epd_portable.runners.receiver_metrics import ReceiverMetrics
from epd_portable.runners.refusals import Refusals, too_large
from epd_portable.scheduling.choice import make_preallocator
from epd_portable.scheduling.encoder_cache import EncoderCacheManager, MultiModalRequest
from epd_portable.scheduling.preallocator import Claim
from epd_portable.wire.descriptors import SlotDescriptor
from epd_portable.wire.messages import NackCode
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
        metrics: Counts what happens; ``None`` counts where nobody looks.
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
        metrics: ReceiverMetrics | None = None,
    ) -> None:
        self._metrics = metrics or ReceiverMetrics()
        self._config = config
        self._cache = cache
        self._clock = clock
        self._requests: dict[str, RequestRecord] = {}
        self._pool = ReceivePool(config.pool, config.pool_bytes, alignment_bytes)
        self._preallocator = make_preallocator(config.preallocation, cache, self._pool)
        self._local_waits = False
        self._orders = OrderBook(self._pool, self._preallocator, copies=copies)
        fence = LeaseFence()
        self._endpoint = ConsumerEndpoint(
            config, fingerprint=fingerprint, pool_bytes=self._pool.capacity_bytes, fence=fence
        )
        self._refusals = Refusals(self._endpoint.send, self._metrics)
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
        self._arrivals = Arrivals(cache, self._preallocator, self._session)

    def request_arrived(
        self,
        request: MultiModalRequest,
        items: Sequence[PromptItem],
        params: PrefillParams | None,
    ) -> None:
        """A request with media was added to the scheduler.

        Items that are in the encoder cache are held for it; those with a transfer are expected;
        the rest is encoded here, unless another request already awaits the same item. What cannot
        be encoded here (no media in the request, or no encoder) never is, whatever happens.
        """
        now = self._clock()
        transfers = match_transfers(items, params)
        reply_to = params.reply_to.encode() if params else b""
        bare = bare_items(items, transfers, can_encode=self._config.can_encode)
        record = RequestRecord(request, items, transfers, reply_to, now, bare)
        self._requests[request.request_id] = record
        self._cache.never_encode(
            request.request_id, (item.input_id for item in items if item.mm_hash in bare)
        )
        for item in items:
            transfer = transfers.get(item.mm_hash)
            other = self._arrivals.drop_others(item)
            if other is not None:
                self._let_go(other)
            if conflict := self._arrivals.conflict(item):
                self._refuse(request.request_id, record, item, NackCode.UNAVAILABLE, conflict)
                return
            if self._cache.check_and_update_cache(request, item.input_id):
                record.note(self._arrivals.outcome(item.mm_hash, transfer))
                if transfer is not None:
                    self._session.decline(transfer.transfer_id)
                continue
            if transfer is None and self._preallocator.get(item.mm_hash) is None:
                continue
            if not self._preallocator.fits_at_all(item.num_embeds, item.tensor.nbytes):
                detail = too_large(item, self._config.instance, self._cache, self._pool)
                self._refuse(request.request_id, record, item, NackCode.TOO_LARGE, detail)
                return
            self._preallocator.claim(
                request.request_id,
                item.input_id,
                mm_hash=item.mm_hash,
                num_embeds=item.num_embeds,
                tensor=item.tensor,
            )
            record.awaited.add(item.mm_hash)
            if transfer is not None:
                self._session.expect(
                    transfer.transfer_id,
                    item.mm_hash,
                    item.tensor,
                    now,
                    encoder=transfer.encoder,
                )
        awaited = [mm_hash for mm_hash in transfers if mm_hash in record.awaited]
        trace("request.arrived", request=request.request_id, awaited=awaited)

    def may_schedule(self, request_id: str, num_computed_tokens: int) -> bool:
        """Tell whether the next token of a request can be computed (or is worth trying).

        False only if that token belongs to an item that is still on its way, or that must be
        encoded here and has no room yet. Text before a missing item is never held up. A request
        that has lost an item for good is failed: it was evicted, and cannot be encoded here.

        Args:
            request_id: A request of this instance.
            num_computed_tokens: Tokens whose KV is there, prefix cache included.
        """
        record = self._requests.get(request_id)
        if record is None:
            return True
        if record.failed:
            return False
        self._note_progress(request_id, record, num_computed_tokens)
        for item in record.items:
            if item.end <= num_computed_tokens or item.mm_hash in self._cache:
                continue
            if item.mm_hash in record.bare and item.mm_hash not in record.awaited:
                self._refusals.add_lost(request_id, record, item.mm_hash, "it is not here any more")
                return False
            if num_computed_tokens < item.begin:
                return True
            if item.mm_hash in record.awaited:
                return False
            has_room = self._cache.can_preallocate(item.num_embeds)
            self._local_waits |= not has_room
            return has_room
        return True

    def encoding_here(self, request_id: str, mm_hash: str) -> None:
        """The scheduler has decided to encode an item on this instance."""
        record = self._requests.get(request_id)
        if record is not None:
            record.note(ItemOutcome(mm_hash=mm_hash, source="local"))
            trace("item.local", request=request_id, mm_hash=mm_hash)
        self._arrivals.forget([mm_hash])

    def request_finished(
        self, request_id: str, num_computed_tokens: int = 0
    ) -> PrefillOutcome | None:
        """A request ended, well or not: whatever only it awaited is given up.

        Args:
            request_id: The request.
            num_computed_tokens: Tokens whose KV was there in the end, prefix cache included.

        Returns:
            How each of its items was had; ``None`` for a request without items.
        """
        record = self._requests.pop(request_id, None)
        if record is None:
            return None
        self._note_progress(request_id, record, num_computed_tokens)
        self._withdraw(request_id, record.awaited)
        self._cache.forget(request_id)
        keys = {item.mm_hash: None for item in record.items}
        items = tuple(record.outcomes[key] for key in keys if key in record.outcomes)
        self._metrics.request_ended(items, record.transfers)
        return PrefillOutcome(
            instance=self._config.instance,
            items=items,
            mm_inputs_done=record.mm_inputs_done,
            mm_inputs_total=record.mm_inputs_total,
        )

    def tick(self) -> None:
        """Exchange messages and act on them; called before every step of the scheduler."""
        self._take_in()
        self._local_waits = False
        self._metrics.room(self._pool, self._cache)

    def take_orders(self, freed: Iterable[str], *, computes: bool) -> WorkerOrders:
        """Return what the workers must do in the step that was just scheduled: `OrderBook.take`."""
        freed = list(freed)
        self._arrivals.forget(freed)
        return self._orders.take(freed, computes=computes)

    def step_done(self) -> None:
        """The oldest step under way has ended: the slots that waited for it are free."""
        self._orders.step_done()
        self._take_in()
        self._metrics.room(self._pool, self._cache)

    def take_unavailable(self) -> set[str]:
        """Return requests that cannot be answered, for the scheduler to fail."""
        return self._refusals.take()

    def close(self) -> None:
        """Stop receiving and remove the pool."""
        self._endpoint.close()

    # --------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Exchange messages, then judge deadlines: what came during a long step came in time."""
        now = self._clock()
        for identity, message in self._endpoint.receive():
            self._session.receive(identity, message, now)
        self._advance(now)

    def _advance(self, now: float) -> None:
        """Hand out room, tell whom it concerns, and again as long as something gives room back."""
        moved = True
        while moved:
            for claim in self._preallocator.reserve():
                trace("item.reserved", mm_hash=claim.mm_hash, nbytes=claim.tensor.nbytes)
            if not self._local_waits:
                self._arrivals.accept(now)
            blocked = self._preallocator.blocked
            if blocked is not None:
                make_way(blocked, self._requests, self._cache)
            messages, events = self._session.poll(now)
            for identity, message in messages:
                self._endpoint.send(identity, message)
                self._metrics.sent(message)
            for event in events:
                if isinstance(event, Landed):
                    self._landed(event, now)
                elif isinstance(event, Failed):
                    self._failed(event)
                elif isinstance(event, Refused):
                    self._refused(event)
                else:
                    self._orders.take_back(event.slot)
            moved = self._expire(now) or bool(events)

    def _slot_for(self, mm_hash: str) -> SlotDescriptor | None:
        claim = self._preallocator.get(mm_hash)
        return claim.slot if claim else None

    def _landed(self, event: Landed, now: float) -> None:
        claim = self._preallocator.finalize(event.mm_hash)
        assert claim.slot is not None
        self._metrics.landed(event, claim.slot)
        self._arrivals.landed(event)
        self._orders.place(
            Placement(
                mm_hash=event.mm_hash,
                slot=claim.slot,
                in_device_memory=registry.in_device_memory(event.path, self._config.platform),
                tensor=event.tensor,
                digest=event.digest,
            )
        )
        for request_id, _ in claim.waiting:
            record = self._requests[request_id]
            record.awaited.discard(event.mm_hash)
            wait_ms = round((now - record.arrived_s) * 1000, 3)
            record.note(transferred(event, wait_ms=wait_ms))
            self._metrics.waited(now - record.arrived_s)
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
        self._metrics.failed(event)
        if event.slot is not None:
            self._preallocator.reopen(event.mm_hash)
        if not event.last or self._session.expects(event.mm_hash):
            return
        claim = self._preallocator.cancel(event.mm_hash)
        if claim is not None:
            self._give_up(claim, event.reason)

    def _refused(self, event: Refused) -> None:
        """Tell the router, which may ask another encoder."""
        logger.warning("item %s by transfer %s: %s", event.mm_hash, event.transfer_id, event.reason)
        self._metrics.refused(event)
        self._refusals.of_encoder(self._requests.values(), event)

    def _expire(self, now: float) -> bool:
        """Give up items that a request awaits beyond its own deadline, by transfers of others.

        Returns:
            Whether there were any.
        """
        wait_s = self._config.wait_timeout_s
        late = [record for record in self._requests.values() if now >= record.arrived_s + wait_s]
        overdue = {mm_hash for record in late for mm_hash in record.awaited}
        for mm_hash in overdue:
            claim = self._preallocator.cancel(mm_hash)
            assert claim is not None
            reason = f"not delivered within {wait_s} s (transfer.wait_timeout_s)"
            logger.warning("item %s: %s", mm_hash, reason)
            self._give_up(claim, reason)
        return bool(overdue)

    def _give_up(self, claim: Claim[SlotDescriptor], reason: str) -> None:
        """Let everybody who awaits an item encode it here, or fail where that is impossible."""
        self._let_go(claim)
        for request_id, _ in claim.waiting:
            record = self._requests[request_id]
            record.awaited.discard(claim.mm_hash)
            if claim.mm_hash in record.bare:
                self._refusals.add_lost(request_id, record, claim.mm_hash, reason)

    def _let_go(self, claim: Claim[SlotDescriptor]) -> None:
        """End the transfers of a cancelled claim; its slot is free once nobody may write it."""
        granted = self._session.item_not_needed(claim.mm_hash)
        self._metrics.ended(granted)
        if claim.slot is not None and granted is None:
            self._pool.give_back(claim.slot)

    def _refuse(
        self,
        request_id: str,
        record: RequestRecord,
        item: PromptItem,
        code: NackCode,
        detail: str,
    ) -> None:
        """Fail a request that has just come, and end all of its transfers."""
        self._withdraw(request_id, record.awaited)
        record.awaited.clear()
        for transfer in record.transfers.values():
            self._session.decline(transfer.transfer_id)
        self._refusals.add(request_id, record, item.mm_hash, code, detail)

    def _note_progress(
        self, request_id: str, record: RequestRecord, num_computed_tokens: int
    ) -> None:
        """Count the items that are computed, and stop awaiting them."""
        if not record.update_mm_inputs_done(num_computed_tokens):
            return
        trace(
            "request.progress",
            request=request_id,
            mm_inputs_done=record.mm_inputs_done,
            mm_inputs_total=record.mm_inputs_total,
        )
        covered = record.covered(num_computed_tokens)
        for mm_hash in covered:
            record.note(ItemOutcome(mm_hash=mm_hash, source="prefix_cache"))
        record.awaited -= covered
        self._withdraw(request_id, covered)

    def _withdraw(self, request_id: str, mm_hashes: Iterable[str]) -> None:
        for claim in self._preallocator.withdraw(request_id, mm_hashes):
            self._let_go(claim)
