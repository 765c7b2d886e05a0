"""An encode instance's side of a store: writes outputs at low priority."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from epd_portable.config.secret import Secret
from epd_portable.encode.producer import TransferOrder
from epd_portable.errors import CorruptEntryError, EPDError, StoreError, StoreFullError
from epd_portable.log import trace
from epd_portable.transfer.circuit_breaker import CircuitBreaker
from epd_portable.transfer.stores.base import Entry, Store, make_store
from epd_portable.transfer.stores.entry import MAX_PAYLOAD_BYTES, Seal
from epd_portable.transfer.stores.metrics import StoreMetrics

if TYPE_CHECKING:
    import torch

    from epd_portable.config.instance import InstanceConfig

logger = logging.getLogger(__name__)

_BATCH_BYTES = 8 << 20
"""Entries are written together up to this size."""
QUEUE_BYTES = 256 << 20
_NICENESS = 10
"""Niceness of the writer's thread."""


ToHost = Callable[[], "torch.Tensor"]
"""Function that returns an output's bytes, ``(nbytes,)`` uint8 on CPU; blocks; `EPDError`s."""
Batch = Sequence[tuple[TransferOrder, ToHost]]


def open_writer(config: InstanceConfig, namespace: str) -> StoreWriter | None:
    """Return the writer of an encode instance; ``None`` if no store is configured."""
    if config.store is None:
        return None
    return StoreWriter(make_store(config.store), Seal(Secret.read(config.secret_file)), namespace)


class StoreWriter:
    """Writes outputs in a thread; never blocks its callers.

    Args:
        namespace: Of the engine, see `Seal.namespace`.
        queue_bytes: Most bytes that wait; outputs beyond are dropped.
        breaker: Opens when a write fails.
    """

    def __init__(
        self,
        store: Store,
        seal: Seal,
        namespace: str,
        *,
        queue_bytes: int = QUEUE_BYTES,
        breaker: CircuitBreaker | None = None,
        metrics: StoreMetrics | None = None,
    ) -> None:
        self._store = store
        self._seal = seal
        self._namespace = namespace
        self._queue_bytes = queue_bytes
        self._breaker = breaker or CircuitBreaker()
        self._metrics = metrics or StoreMetrics("encode")
        self._queue: deque[tuple[TransferOrder, ToHost]] = deque()
        self._waiting_bytes = 0
        self._news = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="epd-store-writer", daemon=True)
        self._thread.start()

    def save_caches(self, order: TransferOrder, to_host: ToHost) -> None:
        """Queue an output, unless the queue is full or the breaker open.

        Args:
            order: A transfer that it was encoded for; its ``item_uuid`` and ``kind`` make the key.
        """
        if self._breaker.state == "open":
            self._metrics.dropped("unavailable")
            return
        with self._news:
            if self._waiting_bytes + order.tensor.nbytes > self._queue_bytes:
                self._metrics.dropped("full")
                return
            self._queue.append((order, to_host))
            self._count(order.tensor.nbytes)
            self._news.notify()

    def reset(self) -> None:
        """Drop outputs that are not written: the engine's weights may change."""
        with self._news:
            self._metrics.dropped("unavailable", len(self._queue))
            self._count(-_nbytes(self._queue))
            self._queue.clear()
        logger.warning(
            "encoder cache reset: entries of the store have the weights with which engines "
            "start. If weights were updated, restart the engines without these entries."
        )

    def close(self, linger_s: float = 0.0) -> None:
        """Stop; outputs in the queue are written within ``linger_s``, or never."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(linger_s)
        self._store.close()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while batch := self._next():
            try:
                if self._breaker.allows():
                    self._write(batch)
                else:
                    self._metrics.dropped("unavailable", len(batch))
            except StoreError as error:
                full = isinstance(error, StoreFullError)
                self._metrics.dropped("full" if full else "error", len(batch))
                if self._breaker.failed():
                    logger.warning("outputs are not stored for a while: %s", error)
            except Exception:
                self._metrics.dropped("error", len(batch))
                self._breaker.failed()
                logger.exception("an output could not be stored; report it with this trace")
            finally:
                self._metrics.breaker(self._breaker)
                with self._news:
                    self._count(-_nbytes(batch))

    def _next(self) -> Batch:
        """Wait for outputs; return some of the oldest, none at the end."""
        with self._news:
            self._news.wait_for(lambda: self._queue or self._closing)
            batch: list[tuple[TransferOrder, ToHost]] = []
            while self._queue and (not batch or _nbytes((*batch, self._queue[0])) <= _BATCH_BYTES):
                batch.append(self._queue.popleft())
            return batch

    def _count(self, nbytes: int) -> None:
        self._waiting_bytes += nbytes
        self._metrics.queued_bytes.set(self._waiting_bytes)

    def _write(self, batch: Batch) -> None:
        """Write the outputs that the store does not have."""
        wanted = {
            self._seal.key(self._namespace, order.item_uuid, order.kind): (order, to_host)
            for order, to_host in batch
        }
        found = self._store.has_caches(list(wanted))
        entries = []
        for (key, (order, to_host)), head in zip(wanted.items(), found, strict=True):
            if head is not None and self._is_of(order, key, head):
                self._metrics.known.inc()
            elif (entry := self._entry(key, order, to_host)) is not None:
                entries.append(entry)
        evicted = self._store.save_caches(entries) if entries else 0
        if self._breaker.close():
            logger.info("outputs are stored again")
        self._metrics.writes.inc(len(entries))
        self._metrics.written_bytes.inc(sum(each.payload.nbytes for each in entries))
        self._metrics.evictions.inc(evicted)
        for entry in entries:
            trace("store.written", mm_hash=entry.mm_hash, nbytes=entry.payload.nbytes)

    def _is_of(self, order: TransferOrder, key: str, raw: bytes) -> bool:
        """Return whether an entry of the store is what would be written."""
        try:
            head = self._seal.open(raw, key)
        except CorruptEntryError:
            return False
        return (head.mm_hash, head.tensor) == (order.mm_hash, order.tensor)

    def _entry(self, key: str, order: TransferOrder, to_host: ToHost) -> Entry | None:
        try:
            if order.tensor.nbytes > MAX_PAYLOAD_BYTES:
                raise StoreFullError(f"{order.tensor.nbytes} bytes, at most {MAX_PAYLOAD_BYTES}")
            payload = to_host().numpy().data
        except EPDError as error:
            logger.warning("item %s is not stored: %s", order.mm_hash, error)
            self._metrics.dropped("error")
            return None
        return self._seal.entry(
            payload,
            key=key,
            mm_hash=order.mm_hash,
            modality=order.modality,
            tensor=order.tensor,
        )


def _nbytes(outputs: Iterable[tuple[TransferOrder, ToHost]]) -> int:
    return sum(order.tensor.nbytes for order, _ in outputs)
