"""Which items of a request a store of encoder outputs has, asked before encoders are chosen."""

from __future__ import annotations

import asyncio
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
from epd_portable.transfer.stores.base import Store, make_store
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
    """Asks a store by threads of its own, for a limited time.

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
        question = _Question(self._store, self._breaker)
        by_key = {self._seal.key(namespace, each.item_uuid, each.modality): each for each in items}
        loop = asyncio.get_running_loop()
        heads: list[bytes | None] | None = None
        with anyio.move_on_after(self._timeout_s) as limit:
            answered = loop.run_in_executor(self._threads, question.heads, list(by_key))
            heads = await asyncio.shield(answered)
        if limit.cancelled_caught:
            question.give_up()
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
        """Ask nothing more; a thread that the store blocks is left alone."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    def _read(self, key: str, raw: bytes) -> StoredItem | None:
        try:
            self._seal.open(raw, key)
        except CorruptEntryError as error:
            self._metrics.asked("corrupt")
            logger.warning("an item is encoded anew: %s", error)
            self._threads.submit(self._discard, key)
            return None
        self._metrics.asked("hit")
        return StoredItem(key)

    def _discard(self, key: str) -> None:
        try:
            self._store.discard(key)
        except StoreError as error:
            logger.warning("%s", error)


class _Question:
    """One question to the store, which may be answered too late."""

    def __init__(self, store: Store, breaker: CircuitBreaker) -> None:
        self._store = store
        self._breaker = breaker
        self._is_late = False

    def heads(self, keys: Sequence[str]) -> list[bytes | None] | None:
        """Return heads; ``None`` if the store does not answer."""
        try:
            found = self._store.has_caches(keys)
        except StoreError as error:
            self._note_failure(str(error))
            return None
        except BaseException as error:
            self._note_failure(repr(error))
            raise
        if not self._is_late and self._breaker.close():
            logger.info("the store is asked again")
        return found

    def give_up(self) -> None:
        """Count the store as failing: the answer did not come in time."""
        self._note_failure("no answer in time")
        self._is_late = True

    def _note_failure(self, reason: str) -> None:
        if not self._is_late and self._breaker.failed():
            logger.warning("the store is not asked for a while: %s", reason)
