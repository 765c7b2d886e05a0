"""Lookup of a request's items in a store of encoder outputs, before encoders are chosen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import anyio

from epd_portable.config.secret import Secret
from epd_portable.config.store import StoreSection
from epd_portable.errors import CorruptEntryError, StoreError
from epd_portable.media.limits import RequestItem
from epd_portable.transfer.circuit_breaker import CircuitBreaker
from epd_portable.transfer.stores.base import make_store
from epd_portable.transfer.stores.entry import Seal
from epd_portable.transfer.stores.metrics import StoreMetrics

logger = logging.getLogger(__name__)

_THREADS = 4


@dataclass(slots=True, eq=False)
class StoredItem:
    """An item that need not be encoded.

    Attributes:
        key: Of its entry.
        usable: Nothing has gone wrong with it yet.
    """

    key: str
    usable: bool = True


class StoreLookup:
    """Queries a store by threads of its own, for a limited time.

    Raises:
        ConfigError: A library is not installed, or the password cannot be read.
    """

    def __init__(
        self,
        section: StoreSection,
        secret: Secret,
        metrics: StoreMetrics,
    ) -> None:
        self._store = make_store(section)
        self._seal = Seal(secret)
        self._timeout_s = section.timeout_s
        self._metrics = metrics
        self._breaker = CircuitBreaker()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="epd-store")

    async def find_items(
        self, items: Sequence[RequestItem], namespace: str
    ) -> dict[str, StoredItem]:
        """Return those of some items that the store has, by ``item_uuid``; never raises.

        Args:
            namespace: Of the entries that the engine loads, see `Seal.namespace`; empty if unknown.
        """
        if not items:
            return {}
        if not namespace or not self._breaker.allows():
            self._metrics.asked("unavailable", len(items))
            return {}
        by_key = {self._seal.key(namespace, each.item_uuid, each.modality): each for each in items}
        loop = asyncio.get_running_loop()
        asked = loop.run_in_executor(self._threads, self._store.has_caches, list(by_key))
        asked.add_done_callback(self._answered)  # Also when the request has been cancelled.
        heads: list[bytes | None] | None = None
        with anyio.move_on_after(self._timeout_s) as limit, contextlib.suppress(StoreError):
            heads = await asyncio.shield(asked)
        if limit.cancelled_caught:
            asked.remove_done_callback(self._answered)
            self._failed("no reply in time")
        self._metrics.breaker(self._breaker)
        if heads is None:
            self._metrics.asked("error", len(items))
            return {}
        stored = {}
        for (key, item), head in zip(by_key.items(), heads, strict=True):
            if head is None:
                self._metrics.asked("miss")
            elif (entry := self._read(key, head)) is not None:
                stored[item.item_uuid] = entry
        return stored

    def close(self) -> None:
        """Send no more queries; a thread that the store blocks is left alone."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    def _answered(self, asked: asyncio.Future[list[bytes | None]]) -> None:
        if asked.cancelled():
            return  # At the end.
        if error := asked.exception():
            self._failed(str(error))
        elif self._breaker.close():
            logger.info("the store is queried again")

    def _failed(self, reason: str) -> None:
        if self._breaker.failed():
            logger.warning("the store is not queried for a while: %s", reason)

    def _read(self, key: str, raw: bytes) -> StoredItem | None:
        try:
            self._seal.open(raw, key)
        except CorruptEntryError as error:
            self._metrics.asked("corrupt")
            logger.warning("an item is encoded again: %s", error)
            self._threads.submit(self._discard, key)
            return None
        self._metrics.asked("hit")
        return StoredItem(key)

    def _discard(self, key: str) -> None:
        try:
            self._store.discard(key)
        except StoreError as error:
            logger.warning("%s", error)
