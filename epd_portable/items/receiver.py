"""PD scheduler: receives items from encode instances, and gives them room."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from epd_portable.errors import TransportError
from epd_portable.items.consumer import ConsumerSession, FailureCause, Transfer
from epd_portable.items.items import Claim, Claimant, Item, State
from epd_portable.items.metrics import ReceiverMetrics
from epd_portable.items.orders import OrderBook
from epd_portable.items.placer import EncodeOrder, Placement
from epd_portable.items.preallocator import EncoderCachePreallocator
from epd_portable.items.slots import ReceivePool
from epd_portable.log import trace
from epd_portable.platforms.traits import TRAITS, PlatformTraits
from epd_portable.transfer import registry
from epd_portable.transfer.endpoint import ConsumerEndpoint
from epd_portable.wire.descriptors import SlotDescriptor
from epd_portable.wire.messages import Grant, Nack
from epd_portable.wire.params import ItemOutcome

if TYPE_CHECKING:
    from epd_portable.config.instance import InstanceConfig

logger = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.05
"""Deadlines are judged so often while no message comes."""


class Receiver:
    """Messages, transfers and slots of a PD instance, in its scheduler's process.

    A thread takes messages in as they come, so that peers wait for no step of the engine. It and
    the engine's take turns by `lock`: the engine's holds it while it schedules, while it takes in
    what a step put out, and whenever it changes what it has of requests or of the encoder cache.
    What requests want of it: `epd_portable.items.prefill`.

    Args:
        fingerprint: Compatibility fingerprint, compared with that of producers.
        cache_size: Of the scheduler's encoder cache, in embeddings.
        encode_together: See `EncoderCachePreallocator`.
        clock: Monotonic seconds.
        metrics: ``None`` counts without publishing.
        namespace: Of the entries that it may load from a store, see `namespace_of`.
        traits: Of the platform, if not those of ``config.platform``.

    Attributes:
        cache: The scheduler's encoder cache.
        orders: What the workers must do in each step.
        pool: Receive slots.
        requested: Transfers that the front is to have an encoder asked for.
        lock: See above; reentrant.
        thread: ``None`` before `listen`.
    """

    def __init__(
        self,
        config: InstanceConfig,
        *,
        fingerprint: str,
        cache_size: int,
        encode_together: int = 0,
        clock: Callable[[], float] = time.monotonic,
        metrics: ReceiverMetrics | None = None,
        namespace: str = "",
        traits: PlatformTraits | None = None,
    ) -> None:
        traits = traits or TRAITS[config.platform]
        self.metrics = metrics or ReceiverMetrics()
        self.clock = clock
        self._platform = config.platform
        self._wait_timeout_s = config.wait_timeout_s
        self.pool = ReceivePool(config.pool, config.pool_bytes, traits.slot_alignment_bytes)
        self._endpoint = ConsumerEndpoint(
            config,
            fingerprint=fingerprint,
            pool_bytes=self.pool.capacity_bytes,
            namespace=namespace,
        )
        self._session = ConsumerSession(
            self._endpoint, self, wait_timeout_s=config.wait_timeout_s, lease_s=config.lease_s
        )
        self.cache = EncoderCachePreallocator(
            cache_size,
            self.pool,
            self._session,
            encode_together=encode_together,
            encode=self._encode,
        )
        self.orders = OrderBook(self.cache, copies=traits.needs_device_copy)
        self.requested: list[str] = []
        self._deadlines: deque[tuple[float, str]] = deque()
        """Of requests, with their ids; those that have ended go in time."""
        self.lock = threading.RLock()
        self.thread: threading.Thread | None = None
        self._paused: set[bool] = set()
        """Of requests that run (``True``) or wait: those that the engine does not compute."""
        self._closing = False
        self._death: BaseException | None = None
        self._has_news = threading.Event()

    # -- requests --------------------------------------------------------------------------------

    def enter(self, record: Claimant) -> None:
        """A request awaits items from now on, until its deadline."""
        self.cache.enter(record)
        if len(self._deadlines) > 4 * len(self.cache.requests) + 64:
            left = (each for each in self._deadlines if each[1] in self.cache.requests)
            self._deadlines = deque(left)
        self._deadlines.append((record.arrived_s + self._wait_timeout_s, record.request_id))

    def expect(self, claim: Claim) -> None:
        """Expect an item by a request's own transfer; load it if it is in a store.

        Where requests of one body share the transfer, it may have ended for the first of them.
        """
        record, item, now = claim.claimant, claim.item, self.clock()
        assert item.tensor is not None
        transfer = record.transfers[item.mm_hash]
        is_new = self._session.expect(transfer.transfer_id, item, now, owner=record.request_id)
        if transfer.transfer_id not in item.transfers:
            self.cache.retain_for(claim)
        elif is_new and transfer.store:
            self._session.receive(*self._endpoint.load(transfer, item.mm_hash, item.tensor), now)

    def left(self, record: Claimant) -> None:
        """A request has ended."""
        for transfer in record.transfers.values():
            self._session.owner_left(transfer.transfer_id, record.request_id)

    def decline(self, record: Claimant) -> None:
        """Answer *not needed* to whatever announces a transfer of a request."""
        for transfer in record.transfers.values():
            self._session.decline(transfer.transfer_id)

    def pause(self, *, waiting: bool, running: bool) -> None:
        """The engine computes no requests that wait, or run, until the next call.

        The time for which they may wait for items begins again then.
        """
        if self._paused:
            now = self.clock()
            self._session.renew(now)
            deadline_s = now + self._wait_timeout_s
            self._deadlines = deque((deadline_s, each) for each in self.cache.requests)
        self._paused = {runs for runs, paused in ((False, waiting), (True, running)) if paused}

    def reset(self) -> None:
        """The engine's encoder cache was reset: nothing that is on its way becomes an entry."""
        self._session.reset(self.clock())
        self.cache.advance()

    # -- steps -----------------------------------------------------------------------------------

    def before_step(self) -> None:
        """A step is about to be scheduled: hand out the room that came back since.

        Raises:
            TransportError: The thread has ended. It ends the engine, which would seem well
                otherwise.
        """
        if self._death is not None:
            raise TransportError(
                f"the thread epd-receiver ended with {self._death!r}, and no item comes to this "
                "instance; restart it"
            ) from self._death
        self._has_news.clear()
        if self.cache.unsettled:
            trace("turn")
        self.cache.advance()
        self.metrics.room(self.pool, self.cache)

    def rest(self, timeout_s: float) -> None:
        """Block until a message was taken in since `before_step`, but no longer than this.

        Not at all if no request waits for its items. Not under `lock`, which messages need.
        """
        if self.cache.unsettled:
            self._has_news.wait(timeout_s)

    def step_done(self) -> None:
        """The oldest step under way has ended: the slots that waited for it are free."""
        self.orders.step_done()
        self.cache.advance()
        self.metrics.room(self.pool, self.cache)

    # -- messages --------------------------------------------------------------------------------

    def listen(self) -> None:
        """Start the thread."""
        self.thread = threading.Thread(target=self._run, name="epd-receiver", daemon=True)
        self.thread.start()

    def take_in(self) -> None:
        """Take in what has come, then judge deadlines: what came during a long step is in time.

        Of a flood only so much that the engine, which waits for the lock, has its turn.
        """
        now = self.clock()
        received = self._endpoint.receive()
        for identity, message in received:
            self._session.receive(identity, message, now)
        self._session.tick(now)
        self._expire(now)
        self.cache.advance()
        self.metrics.note_transfers(*self._session.count_transfers())
        if received:
            self._has_news.set()

    def close(self) -> None:
        """Stop receiving and remove the pool."""
        self._closing = True
        if self.thread is not None:
            self._endpoint.control.wake()
            self.thread.join()
        self._endpoint.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._endpoint.control.wait(_CHECK_EVERY_S)
                with self.lock:
                    if not self._closing:
                        self.take_in()
        except BaseException as error:
            self._death = error
            logger.critical("the thread epd-receiver ends: no item comes here any more")
            raise

    def _expire(self, now: float) -> None:
        """Let requests await items no longer than they may, by whosever transfers these come."""
        while self._deadlines and now >= self._deadlines[0][0]:
            deadline_s, request_id = self._deadlines.popleft()
            record = self.cache.requests.get(request_id)
            if record is None or deadline_s < record.arrived_s + self._wait_timeout_s:
                continue  # It has ended; another of that name has a deadline of its own.
            if record.running in self._paused:
                self._deadlines.append((now + self._wait_timeout_s, request_id))
                continue
            reason = f"not delivered within {self._wait_timeout_s} s (transfer.wait_timeout_s)"
            for claim in list(record.claims.values()):
                self.cache.expire(claim, reason)

    # -- what becomes of transfers: `TransferEvents` ----------------------------------------------

    def may_bring(self, item: Item, transfer_id: str) -> bool:
        """See `TransferEvents`."""
        return self.cache.may_bring(item, transfer_id)

    def landed(self, transfer: Transfer, grant: Grant, *, transfer_s: float) -> None:
        """See `TransferEvents`."""
        item, now = transfer.item, self.clock()
        assert item.tensor is not None and transfer.producer is not None
        self.cache.landed(item)
        placement = Placement(
            mm_hash=item.mm_hash,
            slot=grant.slot,
            in_device_memory=registry.in_device_memory(grant.path, self._platform),
            tensor=item.tensor,
        )
        self.orders.place(item, placement)
        trace(
            "item.landed",
            mm_hash=item.mm_hash,
            transfer=transfer.transfer_id,
            path=grant.path,
            nbytes=item.tensor.nbytes,
            transfer_s=transfer_s,
        )
        stored = grant.path == registry.STORE
        for record in self._records(item):
            wait_s = now - record.arrived_s
            record.note(
                ItemOutcome(
                    mm_hash=item.mm_hash,
                    source="store" if stored else "transfer",
                    encoder="" if stored else transfer.producer.instance,
                    path="" if stored else grant.path,
                    nbytes=item.tensor.nbytes,
                    wait_ms=round(1000 * wait_s, 3),
                    transfer_ms=round(1000 * transfer_s, 3),
                )
            )
            self.metrics.wait_s.observe(wait_s)
        self.metrics.received_bytes.labels(grant.path).inc(item.tensor.nbytes)
        self.metrics.transfer_s.labels(grant.path).observe(transfer_s)

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
        self.metrics.transfers_failed.labels(cause).inc()
        if slot is not None:
            self.cache.lost_slot(item)
        self.cache.lost_transfer(item, reason)
        if item.state is State.RESERVED:
            self._session.room_given(item)

    def refused(self, transfer: Transfer, nack: Nack) -> None:
        """See `TransferEvents`; the front may ask another encoder."""
        mm_hash, transfer_id = transfer.item.mm_hash, transfer.transfer_id
        logger.warning("item %s by transfer %s: %s", mm_hash, transfer_id, nack.detail)
        self.metrics.refusals.labels(nack.code.value).inc()
        if any(self._owners(transfer)):
            self.requested.append(transfer_id)

    def may_wait(self, transfer: Transfer) -> bool:
        """See `TransferEvents`: the engine computes none of its requests at present."""
        owners = list(self._owners(transfer))
        return bool(owners) and all(record.running in self._paused for record in owners)

    def needs_another(self, transfer: Transfer) -> bool:
        """See `TransferEvents`: it cannot be encoded here, and there is an encoder to tell."""
        return not transfer.item.is_here and any(
            transfer.item.mm_hash in record.metadata_only for record in self._owners(transfer)
        )

    def not_needed(self, transfer_id: str) -> None:
        """See `TransferEvents`."""
        self.metrics.not_needed.inc()

    def released(self, slot: SlotDescriptor) -> None:
        """See `TransferEvents`."""
        self.orders.take_back(slot)

    # --------------------------------------------------------------------------------------------

    def _records(self, item: Item) -> list[Claimant]:
        """Return the requests that claim an item."""
        names = (*item.holders, *item.wanted)  # Transfers to others hold items, too.
        return [self.cache.requests[each] for each in names if each in self.cache.requests]

    def _owners(self, transfer: Transfer) -> Iterator[Claimant]:
        """Yield the requests whose own transfer it is."""
        for record in self._records(transfer.item):
            own = record.transfers.get(transfer.item.mm_hash)
            if own is not None and own.transfer_id == transfer.transfer_id:
                yield record

    def _encode(self, claim: Claim) -> bool:
        """Let workers encode an item in the background, if they can."""
        record = claim.claimant
        place = record.items[claim.place]
        if place.media is None:
            return False
        self.orders.encode(
            EncodeOrder(mm_hash=place.mm_hash, modality=place.modality, media=place.media)
        )
        record.note_local(place.mm_hash)
        return True
