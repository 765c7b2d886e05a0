"""The prefill+decode engine's side of transfers: thread, lock, endpoint and metrics around it all.

Calls go in one direction: the shell feeds messages, time and the engine's steps to `transfers` and
to the table, and applies the actions that come out. Nothing else sends, logs or counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from epd_portable.errors import TransportError
from epd_portable.items.encoder_cache import PrefillEncoderCache
from epd_portable.items.metrics import ConsumerMetrics
from epd_portable.items.orders import OrderBook
from epd_portable.items.placer import Placement
from epd_portable.items.slots import ReceivePool
from epd_portable.items.table import Claim, ItemRequest
from epd_portable.items.transfers import Action, Fence, Landed, Send, TransferFailed, Transfers
from epd_portable.log import trace
from epd_portable.platforms.traits import TRAITS, PlatformTraits
from epd_portable.transfer import registry
from epd_portable.transfer.endpoint import ConsumerEndpoint
from epd_portable.wire.messages import NotNeeded
from epd_portable.wire.params import ItemOutcome

if TYPE_CHECKING:
    from epd_portable.config.instance import InstanceConfig

logger = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.05
"""Deadlines are judged so often while no message comes."""


class ItemShell:
    """Messages, transfers and slots of a prefill+decode engine, in its scheduler's process.

    A thread takes messages in as they come, so that peers wait for no step of the engine. It and
    the engine's take turns by `lock`: the engine's holds it while it schedules, while it takes in
    the results of a step, and whenever it changes requests or the encoder cache.

    Args:
        fingerprint: Compatibility fingerprint, compared with that of producers.
        cache_size: Of the scheduler's encoder cache, in embeddings.
        encode_together: See `PrefillEncoderCache`.
        clock: Monotonic seconds.
        metrics: ``None`` counts without publishing.
        namespace: Of the entries that it may load from a store, see `namespace_of`.
        traits: Of the platform, if not those of ``config.platform``.

    Attributes:
        cache: The scheduler's encoder cache: the table.
        orders: Work of the workers in each step.
        pool: Receive slots.
        requested: Transfers that the front is to request of an encoder.
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
        metrics: ConsumerMetrics | None = None,
        namespace: str = "",
        traits: PlatformTraits | None = None,
    ) -> None:
        traits = traits or TRAITS[config.platform]
        self.metrics = metrics or ConsumerMetrics()
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
        self.cache = PrefillEncoderCache(cache_size, self.pool, encode_together=encode_together)
        self._transfers = Transfers(
            self._endpoint,
            self.cache,
            wait_timeout_s=config.wait_timeout_s,
            lease_s=config.lease_s,
        )
        self.orders = OrderBook(self.cache, copies=traits.needs_device_copy)
        self.requested: list[str] = []
        self._deadlines: deque[tuple[float, str]] = deque()
        """Outcomes of requests, by id; those of ended requests are removed in time."""
        self.lock = threading.RLock()
        self.thread: threading.Thread | None = None
        self._closing = False
        self._death: BaseException | None = None
        self._has_news = threading.Event()

    # -- requests --------------------------------------------------------------------------------

    def enter(self, request: ItemRequest) -> None:
        """Let a request await items from now on, until its deadline."""
        self.cache.enter(request)
        if len(self._deadlines) > 4 * len(self.cache.requests) + 64:
            left = (each for each in self._deadlines if each[1] in self.cache.requests)
            self._deadlines = deque(left)
        self._deadlines.append((request.arrived_s + self._wait_timeout_s, request.request_id))

    def expect(self, claim: Claim) -> None:
        """Expect an item by a request's own transfer; load it if it is in a store.

        Where requests of one body share the transfer, it may have ended for the first of them.
        """
        request, item, now = claim.request, claim.item, self.clock()
        assert item.tensor is not None
        transfer = request.transfers[item.mm_hash]
        is_new = self._transfers.expect(transfer.transfer_id, item, now, owner=request.request_id)
        if transfer.transfer_id not in item.transfers:
            self.cache.hold_if_last(claim)
        elif is_new and transfer.store:
            self._transfers.receive(*self._endpoint.load(transfer, item.mm_hash, item.tensor), now)

    def left(self, request: ItemRequest) -> None:
        """Note that a request has ended."""
        for transfer in request.transfers.values():
            self._transfers.owner_left(transfer.transfer_id, request.request_id)
        self.advance()

    def decline(self, request: ItemRequest) -> None:
        """Reply *not needed* to every announcement of a request's transfers."""
        for transfer in request.transfers.values():
            self._transfers.decline(transfer.transfer_id)

    def pause(self, *, waiting: bool, running: bool) -> None:
        """Note that the engine computes no requests that wait, or run, until the next call.

        The time for which they may wait for items begins again then.
        """
        if self._transfers.paused:
            now = self.clock()
            self._transfers.renew(now)
            deadline_s = now + self._wait_timeout_s
            self._deadlines = deque((deadline_s, each) for each in self.cache.requests)
        paused = {runs for runs, paused in ((False, waiting), (True, running)) if paused}
        self._transfers.paused = paused

    def reset(self) -> None:
        """Let nothing that is on its way become an entry: the encoder cache was reset."""
        self._transfers.reset(self.clock())
        self.advance()

    def advance(self) -> None:
        """Serve claims and grant slots until nothing changes any more, then apply the actions."""
        while not self.cache.is_at_rest:
            self._transfers.reconcile(self.cache.take_touched(), self.clock())
            self.cache.serve()
        if self._transfers.has_actions:
            for action in self._transfers.take_actions():
                self._apply(action)

    # -- steps -----------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Hand out the space that came back before the next step is scheduled.

        Raises:
            TransportError: The thread has ended. It ends the engine, which would seem well
                otherwise.
        """
        if self._death is not None:
            raise TransportError(
                f"the thread epd-items ended with {self._death!r}, and no item comes to this "
                "instance; restart it"
            ) from self._death
        if self._has_news.is_set():
            self._has_news.clear()
        if self.cache.incomplete:
            trace("turn")
        self.advance()

    def rest(self, timeout_s: float) -> None:
        """Block until a message was taken in since `before_step`, but no longer than this.

        Not at all if no request waits for its items. Not under `lock`, which messages need.
        """
        if self.cache.incomplete:
            self._has_news.wait(timeout_s)

    def step_done(self) -> None:
        """Note that the oldest step under way has ended: its slots are free."""
        self.orders.step_done()
        self.advance()
        self.metrics.room(self.pool, self.cache)

    # -- messages --------------------------------------------------------------------------------

    def listen(self) -> None:
        """Start the thread."""
        self.thread = threading.Thread(target=self._run, name="epd-items", daemon=True)
        self.thread.start()

    def take_in(self) -> None:
        """Take in messages, then judge deadlines: a message that came in a long step is in time.

        Of a flood only so much that the engine, which waits for the lock, has its turn.
        """
        now = self.clock()
        received = self._endpoint.receive()
        for identity, message in received:
            self._transfers.receive(identity, message, now)
        self._transfers.tick(now)
        self._expire(now)
        self.advance()
        self.metrics.note_transfers(*self._transfers.count())
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
            logger.critical("the thread epd-items ends: no item comes here any more")
            raise

    def _expire(self, now: float) -> None:
        """End the waits of requests at their deadlines, by whosever transfers the items come."""
        while self._deadlines and now >= self._deadlines[0][0]:
            deadline_s, request_id = self._deadlines.popleft()
            request = self.cache.requests.get(request_id)
            if request is None or deadline_s < request.arrived_s + self._wait_timeout_s:
                continue  # It has ended; another of that name has a deadline of its own.
            if request.running in self._transfers.paused:
                self._deadlines.append((now + self._wait_timeout_s, request_id))
                continue
            reason = f"not delivered within {self._wait_timeout_s} s (transfer.wait_timeout_s)"
            self.cache.expire(request, reason)

    # -- actions ---------------------------------------------------------------------------------

    def _apply(self, action: Action) -> None:
        if isinstance(action, Send):
            if isinstance(action.message, NotNeeded):
                self.metrics.not_needed.inc()
            self._endpoint.send(action.identity, action.message)
        elif isinstance(action, Fence):
            fence = self._endpoint.fence
            (fence.allow if action.allowed else fence.forbid)(action.slot)
        elif isinstance(action, Landed):
            self._note_landed(action)
        elif isinstance(action, TransferFailed):
            mm_hash, transfer = action.transfer.item.mm_hash, action.transfer.transfer_id
            logger.warning("item %s by transfer %s: %s", mm_hash, transfer, action.reason)
            trace("item.failed", mm_hash=mm_hash, transfer=transfer, reason=action.reason)
            self.metrics.transfers_failed.labels(action.cause).inc()
        else:
            mm_hash, transfer = action.transfer.item.mm_hash, action.transfer.transfer_id
            logger.warning("item %s by transfer %s: %s", mm_hash, transfer, action.nack.detail)
            self.metrics.refusals.labels(action.nack.code.value).inc()
            if action.wanted:
                self.requested.append(transfer)

    def _note_landed(self, landed: Landed) -> None:
        """Have an item placed, and note its source for the requests that claim it."""
        transfer, grant, item = landed.transfer, landed.grant, landed.transfer.item
        assert item.tensor is not None and transfer.producer is not None
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
            transfer_s=landed.transfer_s,
        )
        stored = grant.path == registry.STORE
        for request in landed.requests:
            wait_s = self.clock() - request.arrived_s
            request.note(
                ItemOutcome(
                    mm_hash=item.mm_hash,
                    source="store" if stored else "transfer",
                    encoder="" if stored else transfer.producer.instance,
                    path="" if stored else grant.path,
                    nbytes=item.tensor.nbytes,
                    wait_ms=round(1000 * wait_s, 3),
                    transfer_ms=round(1000 * landed.transfer_s, 3),
                )
            )
            self.metrics.wait_s.observe(wait_s)
        self.metrics.received_bytes.labels(grant.path).inc(item.tensor.nbytes)
        self.metrics.transfer_s.labels(grant.path).observe(landed.transfer_s)
