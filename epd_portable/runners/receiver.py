"""PD scheduler: expects items, gives them room, and decides what the engine may compute."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, cast

from epd_portable.connector import registry
from epd_portable.connector.consumer import ConsumerSession, FailureCause, Transfer
from epd_portable.connector.endpoint import ConsumerEndpoint
from epd_portable.connector.pool import ReceivePool
from epd_portable.connector.transport import LeaseFence
from epd_portable.log import trace
from epd_portable.platforms.traits import TRAITS, PlatformTraits
from epd_portable.runners.background import EncodeOrder
from epd_portable.runners.messages import LoadReports, MessageThread
from epd_portable.runners.metrics import ReceiverMetrics
from epd_portable.runners.orders import OrderBook
from epd_portable.runners.placer import Placement, WorkerOrders
from epd_portable.runners.prompt import (
    PromptRecord,
    is_own,
    match_transfers,
    metadata_only_items,
    outcome_of,
)
from epd_portable.scheduling.encoder_cache import MultiModalRequest
from epd_portable.scheduling.items import Claim, Item, Origin, PromptItem, State
from epd_portable.scheduling.preallocator import EncoderCachePreallocator
from epd_portable.wire.descriptors import SlotDescriptor
from epd_portable.wire.messages import (
    Announce,
    AnyMessage,
    Grant,
    LoadReport,
    LoadWanted,
    Nack,
    NackCode,
)
from epd_portable.wire.params import ItemOutcome, PrefillOutcome, PrefillParams

if TYPE_CHECKING:
    from epd_portable.config.instance import InstanceConfig

logger = logging.getLogger(__name__)


class Receiver:
    """What a PD instance's scheduler process does for items from elsewhere.

    `MessageThread` calls `take_in`; all else is called by the engine's thread, under its lock.

    Args:
        config: Of this instance.
        fingerprint: Compatibility fingerprint, compared with that of producers.
        cache_size: Of the scheduler's encoder cache, in embeddings.
        lookahead: Tokens beyond those it computes whose items the engine wants
            (speculative decoding; vLLM's ``num_prefill_lookahead``).
        encode_together: See `EncoderCachePreallocator`.
        load: Returns how busy the engine is, see `LoadReports`; ``None`` knows nothing.
        clock: Monotonic seconds.
        metrics: ``None`` counts without publishing.
        namespace: Of the entries that it may load from a store, see `namespace_of`.
        traits: Of the platform, if not those of ``config.platform``: they say how slots are
            aligned, and whether workers copy items out of them. If not, a slot is kept as long as
            its item is in the encoder cache.

    Attributes:
        cache: The scheduler's encoder cache.
    """

    def __init__(
        self,
        config: InstanceConfig,
        *,
        fingerprint: str,
        cache_size: int,
        lookahead: int = 0,
        encode_together: int = 0,
        load: Callable[[], LoadReport] | None = None,
        clock: Callable[[], float] = time.monotonic,
        metrics: ReceiverMetrics | None = None,
        namespace: str = "",
        traits: PlatformTraits | None = None,
    ) -> None:
        traits = traits or TRAITS[config.platform]
        self._metrics = metrics or ReceiverMetrics()
        self._config = config
        self._lookahead = lookahead
        self._clock = clock
        self._arrivals: deque[tuple[float, str]] = deque()
        """Deadlines of requests, and their ids; those that have ended go in time."""
        self._numbers = itertools.count()
        self._unavailable: set[str] = set()
        self._sleepers: list[str] = []
        self._pool = ReceivePool(config.pool, config.pool_bytes, traits.slot_alignment_bytes)
        fence = LeaseFence()
        self._endpoint = ConsumerEndpoint(
            config,
            fingerprint=fingerprint,
            pool_bytes=self._pool.capacity_bytes,
            fence=fence,
            namespace=namespace,
        )
        self._session = ConsumerSession(
            send=self._send,
            events=self,
            choose=self._endpoint.choose,
            fingerprint=fingerprint,
            verify_transfer=self._endpoint.verify_transfer,
            is_gone=self._endpoint.is_gone,
            fence=fence,
            fenced_paths=registry.fenced_paths(),
            wait_timeout_s=config.wait_timeout_s,
            lease_s=config.lease_s,
        )
        self.cache = EncoderCachePreallocator(
            cache_size,
            self._pool,
            self._session,
            accepts_early=config.preallocation == "async",
            encode_together=encode_together,
            encode=self._encode,
        )
        self._requests = cast("dict[str, PromptRecord]", self.cache.requests)
        self._orders = OrderBook(self._pool, self.cache, copies=traits.needs_device_copy)
        self._loads = LoadReports(load or LoadReport, self._send)
        self._messages = MessageThread(self._endpoint, self.take_in)
        self._has_news = threading.Event()

    @property
    def lock(self) -> threading.RLock:
        """See `MessageThread.lock`."""
        return self._messages.lock

    # -- requests --------------------------------------------------------------------------------

    def request_arrived(
        self,
        request: MultiModalRequest,
        items: Sequence[PromptItem],
        params: PrefillParams | None,
    ) -> None:
        """A request with media was added to the scheduler.

        It claims its items, in the order of the prompt. Those with a transfer are expected; the
        rest is encoded here, unless another request already awaits the same item. What cannot be
        encoded here (no media in the request, or no encoder) never is, whatever happens.
        """
        now = self._clock()
        transfers = match_transfers(items, params)
        record = PromptRecord(
            request.request_id,
            next(self._numbers),
            items=items,
            transfers=transfers,
            reply_to=params.reply_to.encode() if params else b"",
            arrived_s=now,
            metadata_only=metadata_only_items(items, transfers, can_encode=self._config.can_encode),
        )
        self.cache.enter(record)
        self._note_arrival(record)
        if not self._refuse_crowd(record):
            for prompt_item in items:
                if not self._claim(record, prompt_item, now):
                    break
        awaited = [
            mm_hash
            for mm_hash in transfers
            if mm_hash in record.claims and not record.claims[mm_hash].item.is_here
        ]
        trace("request.arrived", request=request.request_id, awaited=awaited)
        self._advance()
        for claim in record.claims.values():
            if claim.item.is_here and (claim.served or is_own(claim.item, record)):
                record.note(outcome_of(claim.item, record))

    def session_arrived(self, request: MultiModalRequest) -> None:
        """A part of a session with media has come: the session is failed.

        vLLM adds each part to the request of the first (streaming input), and items of parts that
        are to come cannot be claimed in their order.
        """
        record = self._requests.get(request.request_id)
        if record is None:
            record = PromptRecord(request.request_id, next(self._numbers))
            self.cache.enter(record)
        if not record.failed:
            detail = (
                f"request {request.request_id} sends media in parts (a streaming-input session), "
                f"which {self._config.instance} does not take: send the request as a whole"
            )
            logger.error("%s", detail)
            self._refuse(record, "", NackCode.UNAVAILABLE, detail)

    def may_schedule(
        self, request_id: str, num_computed_tokens: int, *, running: bool = True
    ) -> bool:
        """Return whether the next token of a request can be computed.

        False if that token belongs to an item that is not here and cannot be encoded here now, or
        if the request has not begun and must wait for its room (`may_start` of the preallocator).
        Text before a missing item is not held up otherwise. A request that has lost an item for
        good is failed.

        Args:
            request_id: A request of this instance.
            num_computed_tokens: Tokens whose KV is there, prefix cache included. Of a request that
                is not running this is what *would* be there: nothing is given up for it yet.
            running: The engine has begun to compute the request, and not preempted it since.
        """
        record = self._requests.get(request_id)
        if record is None:
            return True
        if record.failed:
            return False
        self._moved(record, num_computed_tokens, running=running)
        may = self._may_schedule(record)
        if not may and not running and not record.failed:
            self._sleepers.append(request_id)
        return may

    def take_sleepers(self) -> list[str]:
        """Return requests that could not begin in the step that was just scheduled.

        The engine need not ask for them again before `take_woken` returns them.
        """
        sleepers, self._sleepers = self._sleepers, []
        return [request_id for request_id in sleepers if request_id in self._requests]

    def take_woken(self) -> list[str]:
        """Return requests that may begin now, if they slept; the oldest first."""
        woken = [self._requests[request_id] for request_id in self.cache.take_woken()]
        return [record.request_id for record in sorted(woken, key=lambda each: each.number)]

    def encoding_here(self, request_id: str, mm_hash: str) -> None:
        """The scheduler has decided to encode an item on this instance."""
        record = self._requests.get(request_id)
        if record is not None:
            record.note(ItemOutcome(mm_hash=mm_hash, source="local"))
            trace("item.local", request=request_id, mm_hash=mm_hash)

    def encoded(self, mm_hashes: Iterable[str]) -> None:
        """Items that were encoded in the background are in the workers' encoder caches."""
        for mm_hash in mm_hashes:
            self.cache.encoded(mm_hash)

    def not_encoded(self, mm_hashes: Iterable[str]) -> None:
        """Items could not be encoded in the background: a step has to, as vLLM does it."""
        for mm_hash in mm_hashes:
            self.cache.not_encoded(mm_hash)

    def request_finished(
        self, request_id: str, num_computed_tokens: int = 0
    ) -> PrefillOutcome | None:
        """A request ended, well or not: whatever only it awaited is given up.

        Args:
            request_id: The request.
            num_computed_tokens: Tokens whose KV was there in the end, prefix cache included.

        Returns:
            Where each of its items came from; ``None`` for a request without items.
        """
        record = self._requests.get(request_id)
        if record is None:
            return None
        if num_computed_tokens >= record.num_computed_tokens:
            self._moved(record, num_computed_tokens, running=True)
        for item in record.items:
            if item.end <= num_computed_tokens:
                record.note(ItemOutcome(mm_hash=item.mm_hash, source="encoder_cache"))
        self.cache.leave(record)
        self._unavailable.discard(request_id)
        names = dict.fromkeys(item.mm_hash for item in record.items)
        items = tuple(record.outcomes[name] for name in names if name in record.outcomes)
        self._metrics.request_ended(items, record.transfers)
        return PrefillOutcome(
            instance=self._config.instance,
            items=items,
            mm_inputs_done=record.mm_inputs_done,
            mm_inputs_total=len(record.items),
        )

    def take_unavailable(self) -> set[str]:
        """Return requests that cannot be answered, for the scheduler to fail."""
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    # -- steps -----------------------------------------------------------------------------------

    def before_step(self) -> None:
        """A step is about to be scheduled: hand out the room that came back since.

        Raises:
            TransportError: The listener has died. It ends the engine, which would seem well
                otherwise.
        """
        self._messages.check()
        self._has_news.clear()
        if self.cache.unsettled:
            trace("turn")
        self._advance()
        self._metrics.room(self._pool, self.cache)

    def rest(self, timeout_s: float) -> None:
        """Block until a message was taken in since `before_step`, but no longer than this.

        Not at all if no request waits for its items. Not under `lock`, which messages need.
        """
        if self.cache.unsettled:
            self._has_news.wait(timeout_s)

    def take_orders(self, freed: Iterable[str], *, computes: bool) -> WorkerOrders:
        """See `OrderBook.take_orders`."""
        return self._orders.take_orders(freed, computes=computes)

    def step_done(self) -> None:
        """The oldest step under way has ended: the slots that waited for it are free."""
        self._orders.step_done()
        self._advance()
        self._metrics.room(self._pool, self.cache)

    # -- messages --------------------------------------------------------------------------------

    def listen(self) -> None:
        """Take messages in as they come, by a thread, until `close`."""
        self._messages.start()

    def take_in(self) -> None:
        """Take in what has come, then judge deadlines: what came during a long step is in time.

        Of a flood only so much that the engine, which waits for the lock, has its turn.
        """
        now = self._clock()
        received = self._endpoint.receive()
        for identity, message in received:
            if isinstance(message, LoadWanted):
                self._loads.subscribe(identity, now)
            else:
                self._session.receive(identity, message, now)
        self._session.tick(now)
        self._loads.tick(now)
        self._expire(now)
        self._advance()
        if received:
            self._has_news.set()

    def close(self) -> None:
        """Stop receiving and remove the pool."""
        self._messages.close()

    def _send(self, identity: bytes, message: AnyMessage) -> None:
        self._endpoint.send(identity, message)
        self._metrics.sent(message)

    # -- what becomes of transfers: `TransferEvents` ----------------------------------------------

    def announced(self, announce: Announce) -> None:
        """See `TransferEvents`; the item is accepted if the preallocator has room for it."""
        self._advance()

    def may_bring(self, item: Item, transfer_id: str) -> bool:
        """See `TransferEvents`."""
        return self.cache.may_bring(item, transfer_id)

    def landed(self, transfer: Transfer, grant: Grant, *, transfer_s: float, digest: str) -> None:
        """See `TransferEvents`."""
        item, slot, now = transfer.item, grant.slot, self._clock()
        assert item.tensor is not None and transfer.producer is not None
        item.origin = Origin(
            transfer_id=transfer.transfer_id,
            encoder=transfer.producer.instance,
            path=grant.path,
            transfer_s=transfer_s,
        )
        self.cache.landed(item)
        placement = Placement(
            mm_hash=item.mm_hash,
            slot=slot,
            in_device_memory=registry.in_device_memory(grant.path, self._config.platform),
            tensor=item.tensor,
            digest=digest,
        )
        self._orders.place(item, placement)
        trace(
            "item.landed",
            mm_hash=item.mm_hash,
            transfer=transfer.transfer_id,
            path=grant.path,
            nbytes=item.tensor.nbytes,
            transfer_s=transfer_s,
        )
        for request_id in (*item.holders, *item.wanted):
            record = self._requests[request_id]
            wait_s = now - record.arrived_s
            record.note(outcome_of(item, record, wait_s=wait_s))
            self._metrics.waited(wait_s)
        self._metrics.landed(grant, item.tensor.nbytes, transfer_s)

    def failed(
        self,
        transfer: Transfer,
        slot: SlotDescriptor | None,
        *,
        cause: FailureCause,
        reason: str,
    ) -> None:
        """See `TransferEvents`."""
        item = transfer.item
        logger.warning("item %s by transfer %s: %s", item.mm_hash, transfer.transfer_id, reason)
        trace("item.failed", mm_hash=item.mm_hash, transfer=transfer.transfer_id, reason=reason)
        self._metrics.failed(transfer.transfer_id, cause, slot)
        self._lost(item, slot, reason)

    def refused(self, transfer: Transfer, nack: Nack) -> None:
        """See `TransferEvents`; the router may ask another encoder."""
        mm_hash = transfer.item.mm_hash
        logger.warning("item %s by transfer %s: %s", mm_hash, transfer.transfer_id, nack.detail)
        self._metrics.refused(nack)
        for request_id in (*transfer.item.holders, *transfer.item.wanted):
            record = self._requests[request_id]
            own = record.transfers.get(mm_hash)
            if own is not None and own.transfer_id == transfer.transfer_id:
                self._send_nack(record, transfer.transfer_id, nack.code, nack.detail)

    def revoked(self, slot: SlotDescriptor) -> None:
        """See `TransferEvents`."""
        self._metrics.ended(slot)

    def released(self, slot: SlotDescriptor) -> None:
        """See `TransferEvents`."""
        self._orders.take_back(slot)

    # --------------------------------------------------------------------------------------------

    def _claim(self, record: PromptRecord, prompt_item: PromptItem, now: float) -> bool:
        """Let a request that has just come claim one of its items; fail it if that cannot be."""
        mm_hash = prompt_item.mm_hash
        transfer = record.transfers.get(mm_hash)
        nbytes = prompt_item.tensor.nbytes if transfer is not None else 0
        if not self.cache.fits_at_all(prompt_item.num_embeds, nbytes):
            detail = (
                f"an item of this request needs {prompt_item.num_embeds} encoder embeddings in "
                f"{prompt_item.tensor.nbytes} bytes; {self._config.instance} receives at most "
                f"{self.cache.cache_size} embeddings and {self._pool.capacity_bytes} bytes: "
                "send a smaller picture, or raise transfer.pool_bytes"
            )
            self._refuse(record, mm_hash, NackCode.TOO_LARGE, detail)
            return False
        transfer_id = "" if transfer is None else transfer.transfer_id
        again = mm_hash in record.claims
        claim = self.cache.claim(record, prompt_item, transfer_id)
        if claim is None:
            here = self.cache.items[mm_hash].tensor
            detail = (
                f"item {mm_hash} of this request is {prompt_item.tensor}, but requests before it "
                f"use an item of that name that is {here}: give different items different uuids"
            )
            self._refuse(record, mm_hash, NackCode.UNAVAILABLE, detail)
            return False
        if transfer is not None and not again:
            self._session.expect(transfer_id, claim.item, now, encoder=transfer.encoder)
            if transfer.store:
                loading = self._endpoint.load(transfer, mm_hash, prompt_item.tensor)
                self._session.receive(*loading, now)
        return True

    def _encode(self, claim: Claim) -> bool:
        """Let workers encode an item in the background, if they can."""
        record = self._requests[claim.claimant.request_id]
        prompt_item = record.items[claim.place]
        if prompt_item.media is None:
            return False
        self._orders.encode(
            EncodeOrder(
                mm_hash=prompt_item.mm_hash,
                modality=prompt_item.modality,
                media=prompt_item.media,
            )
        )
        self.encoding_here(record.request_id, prompt_item.mm_hash)
        return True

    def _refuse_crowd(self, record: PromptRecord) -> bool:
        """Fail a request whose items a drafter would want at once, more than the cache holds."""
        if not self._lookahead:
            return False
        for index, first in enumerate(record.items):
            sizes = {
                each.mm_hash: each.num_embeds
                for each in record.items[index:]
                if each.begin < first.end + 2 * self._lookahead
            }
            if sum(sizes.values()) > self.cache.cache_size:
                detail = (
                    f"{len(sizes)} items of this request are {sum(sizes.values())} encoder "
                    f"embeddings, which speculative decoding needs at once (it reads "
                    f"{self._lookahead} tokens ahead); {self._config.instance} holds "
                    f"{self.cache.cache_size}: raise max_num_batched_tokens in engine_args, or "
                    "send smaller pictures"
                )
                self._refuse(record, first.mm_hash, NackCode.TOO_LARGE, detail)
                return True
        return False

    def _may_schedule(self, record: PromptRecord) -> bool:
        computed, first = record.num_computed_tokens, record.next_item
        if first == len(record.items):
            if record.running:
                self.cache.unsettled.discard(record.request_id)
            return True
        if not record.running and not self.cache.may_start(record):
            return False
        if record.items[first].mm_hash in record.lost:  # Text before it would be in vain.
            self._fail_lost(record, record.items[first].mm_hash)
            return False
        for item in itertools.islice(record.items, first, None):
            if computed + self._lookahead < item.begin:
                break
            if item.end <= computed:
                continue
            if item.mm_hash in record.lost:
                self._fail_lost(record, item.mm_hash)
                return False
            claim = record.claims[item.mm_hash]
            if not claim.served:
                return False
            if not (claim.item.is_here or self.cache.may_encode(claim.item, record.request_id)):
                return False
        return True

    def _advance(self) -> None:
        self.cache.advance()
        if self.cache.accepts_early and not self.cache.is_blocked:
            for announce in self._session.early():
                if not self._accept(announce):
                    break

    def _accept(self, announce: Announce) -> bool:
        """Give an item room before its request; return whether those behind it may have some."""
        tensor = announce.tensor
        if announce.mm_hash in self.cache.items or not self.cache.fits_at_all(
            tensor.shape[0], tensor.nbytes
        ):
            self._session.pass_over(announce.transfer_id)
            return True
        item = self.cache.accept(announce.mm_hash, tensor)
        if item is None:
            return False
        now = self._clock()
        self._session.expect(announce.transfer_id, item, now, asked=False)
        trace(
            "item.accepted",
            mm_hash=announce.mm_hash,
            transfer=announce.transfer_id,
            nbytes=tensor.nbytes,
        )
        return True

    def _lost(self, item: Item, slot: SlotDescriptor | None, reason: str) -> None:
        """A transfer of an item came to nothing; with it went a slot, if it had one."""
        if slot is not None:
            self.cache.lost_slot(item)
        self.cache.lost_transfer(item, reason)
        if item.state is State.RESERVED:
            self._session.room_given(item)

    def _note_arrival(self, record: PromptRecord) -> None:
        if len(self._arrivals) > 4 * len(self._requests) + 64:
            self._arrivals = deque(each for each in self._arrivals if each[1] in self._requests)
        deadline_s = record.arrived_s + self._config.wait_timeout_s
        self._arrivals.append((deadline_s, record.request_id))

    def _expire(self, now: float) -> None:
        """Let requests await items no longer than they may, by whosever transfers these come."""
        while self._arrivals and now >= self._arrivals[0][0]:
            deadline_s, request_id = self._arrivals.popleft()
            record = self._requests.get(request_id)
            if record is None or deadline_s < record.arrived_s + self._config.wait_timeout_s:
                continue  # It has ended; another of that name has a deadline of its own.
            reason = (
                f"not delivered within {self._config.wait_timeout_s} s (transfer.wait_timeout_s)"
            )
            for claim in list(record.claims.values()):
                self.cache.expire(claim, reason)

    def _refuse(self, record: PromptRecord, mm_hash: str, code: NackCode, detail: str) -> None:
        """Let the scheduler end a request, and send the router a nack of one of its transfers.

        Args:
            record: Of the request, which has not failed yet.
            mm_hash: The item that cannot be obtained.
            code: Why, for the router.
            detail: Why, for people: value, limit and remedy.
        """
        self._metrics.request_failed(code)
        self._unavailable.add(record.request_id)
        self.cache.fail(record)
        for transfer in record.transfers.values():
            self._session.decline(transfer.transfer_id)
        if record.transfers:
            own = record.transfers.get(mm_hash) or next(iter(record.transfers.values()))
            self._send_nack(record, own.transfer_id, code, detail)

    def _fail_lost(self, record: PromptRecord, mm_hash: str) -> None:
        detail = (
            f"item {mm_hash}: {record.lost[mm_hash]}; it cannot be encoded here, where the request "
            "holds no media or the instance no encoder: send the request again"
        )
        logger.warning("request %s: %s", record.request_id, detail)
        self._refuse(record, mm_hash, NackCode.UNAVAILABLE, detail)

    def _send_nack(
        self, record: PromptRecord, transfer_id: str, code: NackCode, detail: str
    ) -> None:
        if record.reply_to:
            nack = Nack(transfer_id=transfer_id, code=code, detail=detail)
            self._endpoint.send(record.reply_to, nack)

    def _moved(self, record: PromptRecord, num_computed_tokens: int, *, running: bool) -> None:
        """See `EncoderCachePreallocator.moved`; remembers what the prefix cache covered."""
        for claim in self.cache.moved(record, num_computed_tokens, running=running):
            record.note(ItemOutcome(mm_hash=claim.item.mm_hash, source="prefix_cache"))
        if not running:
            return
        if record.next_item > record.mm_inputs_done:
            record.mm_inputs_done = record.next_item
            trace(
                "request.progress",
                request=record.request_id,
                mm_inputs_done=record.mm_inputs_done,
                mm_inputs_total=len(record.items),
            )
            for item in record.items:
                if item.mm_hash in record.lost and item.end <= num_computed_tokens:
                    record.note(ItemOutcome(mm_hash=item.mm_hash, source="prefix_cache"))
