"""Metrics of an instance, in Prometheus form; each is listed in ``docs/metrics.md``.

`epd_portable.vllm_plugin.exposition` brings it to the page that the instance serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from prometheus_client import CollectorRegistry

from epd_portable.instruments import Instruments
from epd_portable.items.slots import ReceivePool
from epd_portable.items.table import ItemTable
from epd_portable.items.transfers import FailureCause
from epd_portable.wire.messages import NackCode
from epd_portable.wire.params import ItemOutcome, Source

_CODES = tuple(code.value for code in NackCode if code is not NackCode.RELEASED)
RequestFailure = Literal["too_large", "unavailable"]
"""Cause of a request's failure. ``too_large``: an item exceeds the receive pool or the encoder
cache. ``unavailable``: an item was not delivered in time, and the instance cannot encode it."""


class SenderMetrics(Instruments):
    """Metrics of the worker's process.

    Attributes:
        transfers: By ``source``: ``encoder``, if the output is computed now; ``cache``, if the
            encoder cache has it; ``host``, if its copy in host memory was restored.
        ended: By ``result``: ``settled`` or ``failed``.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        counter = self._counter
        self.transfers = counter(
            "epd_encode_transfers",
            "Transfers begun, by source of the output.",
            "source",
            ("encoder", "cache", "host"),
        )
        self.ended = counter(
            "epd_encode_transfers_ended",
            "Transfers that ended: the consumer has the item or does not need it, or it failed.",
            "result",
            ("settled", "failed"),
        )
        self.sent_bytes = counter("epd_encode_sent_bytes", "Bytes written into slots.", "path")
        self.write_failures = counter("epd_encode_write_failures", "Writes that failed.", "path")
        self.write_s = self._seconds(
            "epd_encode_write_seconds", "Duration of the writes that did not fail.", "path"
        )
        self.in_flight = self._gauge(
            "epd_encode_transfers_in_flight", "Transfers that have not ended."
        )


class ConsumerMetrics(Instruments):
    """Metrics of the scheduler's process. Not for several threads."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        counter, seconds, gauge = self._counter, self._seconds, self._gauge
        self._room: tuple[int, int, int] | None = None
        self._items = counter(
            "epd_pd_items",
            "Items of requests that have ended, by source.",
            "source",
            get_args(Source),
        )
        self._fallbacks = counter(
            "epd_pd_fallbacks", "Items encoded here although a transfer was expected."
        )
        self.requests_failed = counter(
            "epd_pd_requests_failed",
            "Requests that failed for an item.",
            "code",
            get_args(RequestFailure),
        )
        self.stalls = counter(
            "epd_pd_stalls",
            "Waits for items that nothing but the deadline of all claims ended: faults.",
        )
        self.not_needed = counter(
            "epd_pd_not_needed", "Replies that an item exists already or is not needed."
        )
        self.refusals = counter(
            "epd_pd_refusals",
            "Encoders that were refused, or cancelled an item that another delivers.",
            "code",
            _CODES,
        )
        self.transfers_failed = counter(
            "epd_pd_transfers_failed",
            "Transfers that ended without their item.",
            "cause",
            get_args(FailureCause),
        )
        self.received_bytes = counter("epd_pd_received_bytes", "Bytes received.", "path")
        self.transfer_s = seconds(
            "epd_pd_transfer_seconds", "From the grant of a slot to the news of its write.", "path"
        )
        self.wait_s = seconds(
            "epd_pd_item_wait_seconds", "From a request's arrival to that of an item it awaited."
        )
        self._in_flight = gauge("epd_pd_transfers_in_flight", "Slots granted and not yet written.")
        self._waiting = gauge(
            "epd_pd_transfers_waiting", "Transfers that are announced and have no space yet."
        )
        self._pool = gauge("epd_pd_pool_bytes", "Size of the receive pool.")
        self._pool_used = gauge("epd_pd_pool_used_bytes", "Bytes of it that are in slots.")
        self._cache = gauge("epd_pd_encoder_cache_embeddings", "Size of the encoder cache.")
        self._cache_used = gauge(
            "epd_pd_encoder_cache_used_embeddings",
            "Space in it that is taken, by entries and for awaited items.",
        )
        self._cache_held = gauge(
            "epd_pd_encoder_cache_held_embeddings",
            "Space in it that is not available: requests hold the entry, or an item is awaited.",
        )

    def request_ended(self, items: Iterable[ItemOutcome], expected: Mapping[str, object]) -> None:
        """Count a request that ended, well or not.

        Args:
            items: Where its items came from.
            expected: Those that a transfer was to bring, by ``mm_hash``.
        """
        for item in items:
            self._items.labels(item.source).inc()
            if item.source == "local" and item.mm_hash in expected:
                self._fallbacks.inc()

    def note_transfers(self, granted: int, waiting: int) -> None:
        """Note how many transfers have a slot to be written, and how many wait for one."""
        self._in_flight.set(granted)
        self._waiting.set(waiting)

    def room(self, pool: ReceivePool, cache: ItemTable) -> None:
        """Note how much space is taken; cheap if that has not changed, as after most steps."""
        now = (pool.free_bytes, cache.num_free_slots, cache.num_freeable_slots)
        if now == self._room:
            return
        self._room = now
        free_bytes, free, freeable = now
        self._pool.set(pool.capacity_bytes)
        self._pool_used.set(pool.capacity_bytes - free_bytes)
        self._cache.set(cache.cache_size)
        self._cache_used.set(cache.cache_size - free)
        self._cache_held.set(cache.cache_size - freeable)
