"""What the router asks of a store of encoder outputs, before it chooses encoders.

Entries are of engines that serve one thing, whose name (`EncodeOutcome.namespace`) the router hears
in the answers to encode jobs, those of an introduction among them. It asks nothing before that,
nor while encode instances serve different things.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import anyio
import msgspec

from epd_portable.config.secret import Secret
from epd_portable.config.store import StoreSection
from epd_portable.connector.stores.base import Entry, Store, make_store
from epd_portable.connector.stores.breaker import Breaker
from epd_portable.connector.stores.entry import Seal
from epd_portable.connector.stores.file import FileStore
from epd_portable.connector.stores.metrics import StoreMetrics
from epd_portable.delivery.instances import EndpointPool
from epd_portable.errors import CorruptEntryError, StoreError
from epd_portable.router.contents.media import MediaItem
from epd_portable.wire.params import EncodedItem, EncodeOutcome

logger = logging.getLogger(__name__)

_THREADS = 4


@dataclass(slots=True, eq=False)
class StoredItem:
    """An item that need not be encoded.

    Attributes:
        key: Of its entry.
        metadata: What a PD instance must know of it in place of its media.
        usable: Nothing has gone wrong with it yet.
    """

    key: str
    metadata: EncodedItem
    usable: bool = True

    def serves(self, *, metadata_only: bool) -> bool:
        """Return whether a PD instance can have the item so; ``metadata_only``: without media."""
        return self.usable and (bool(self.metadata.metadata) or not metadata_only)


class StoreLookup:
    """Asks a store by threads of its own, for a limited time.

    Args:
        section: Of the configuration; ``None`` asks nobody.
        secret: Of the deployment.
        metrics: Counts what happens.
        instances: Those that there are.

    Raises:
        ConfigError: A library is not installed, or the password cannot be read.
    """

    def __init__(
        self,
        section: StoreSection | None,
        secret: Secret,
        metrics: StoreMetrics,
        instances: EndpointPool,
    ) -> None:
        self._store: Store | None = None
        self._metrics = metrics
        self._instances = instances
        self._namespaces: dict[str, str] = {}
        self._breaker = Breaker()
        if section is not None:
            self._store = make_store(section)
            self._seal = Seal(secret)
            self._timeout_s = section.timeout_s
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="epd-store")

    def hear(self, encoder: str, answer: bytes) -> None:
        """Take in the answer to an encode job: it says which entries the encoder writes."""
        if self._store is None:
            return
        try:
            outcome = msgspec.json.decode(answer, type=_Answer).ec_transfer_params
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return  # Whoever waits for it says so.
        if outcome is not None and outcome.namespace:
            self._namespaces[encoder] = outcome.namespace

    async def find(self, items: Sequence[MediaItem]) -> dict[str, StoredItem]:
        """Return those of some items that the store has, by the router's names; never raises."""
        if self._store is None or not items:
            return {}
        namespace = self._namespace()
        if not namespace or not self._breaker.allows():
            self._metrics.asked("unavailable", len(items))
            return {}
        asking = _Asking(self._store, self._breaker)
        names = {self._seal.key(namespace, each.item_uuid, each.modality): each for each in items}
        loop = asyncio.get_running_loop()
        found: list[bytes | None] | None = None
        with anyio.move_on_after(self._timeout_s) as limit:
            answered = loop.run_in_executor(self._threads, asking.heads, list(names))
            found = await asyncio.shield(answered)
        if limit.cancelled_caught:
            asking.too_late()
        self._metrics.breaker(self._breaker)
        stored: dict[str, StoredItem] = {}
        if found is None:
            self._metrics.asked("error", len(items))
            return stored
        for (key, item), raw in zip(names.items(), found, strict=True):
            one = self._read(key, raw) if raw is not None else self._adopt(key, item)
            if one is not None:
                stored[item.item_uuid] = one
        return stored

    def close(self) -> None:
        """Ask nothing more; a thread that the store blocks is left alone."""
        if self._store is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._store.close()

    # --------------------------------------------------------------------------------------------

    def _namespace(self) -> str:
        """Return what encode instances agree on; empty if that is nothing."""
        encoders = (each.name for each in self._instances.of_duty("encode"))
        there = [name for name in encoders if name in self._namespaces]
        said = {self._namespaces[name] for name in there or self._namespaces}
        if there:
            self._namespaces = {name: self._namespaces[name] for name in there}
        return said.pop() if len(said) == 1 else ""

    def _read(self, key: str, raw: bytes) -> StoredItem | None:
        try:
            head = self._seal.open(raw, key)
        except CorruptEntryError as error:
            self._metrics.asked("corrupt")
            logger.warning("an item is encoded anew: %s", error)
            self._later(functools.partial(self._discard, key))
            return None
        self._metrics.asked("hit")
        metadata = EncodedItem(mm_hash=head.mm_hash, modality=head.modality, metadata=head.metadata)
        return StoredItem(key, metadata)

    def _adopt(self, key: str, item: MediaItem) -> StoredItem | None:
        """Note that an item is not there; let one that vLLM's example wrote be there next time."""
        self._metrics.asked("miss")
        if isinstance(self._store, FileStore) and self._store.takes_examples:
            self._later(functools.partial(self._take_example, self._store, key, item))
        return None

    def _take_example(self, store: FileStore, key: str, item: MediaItem) -> None:
        example = store.example(item.item_uuid)
        if example is None:
            return
        spec, data = example
        payload = memoryview(data)
        head = self._seal.head(
            payload,
            key=key,
            mm_hash=item.item_uuid,
            modality=item.modality,
            metadata=None,
            tensor=spec,
        )
        entry = Entry(
            key=key,
            head=head,
            payload=payload,
            mm_hash=item.item_uuid,
            dtype=spec.dtype,
            shape=spec.shape,
        )
        store.save_caches([entry])
        logger.info("item %s of vLLM's ECExampleConnector is taken", item.item_uuid)

    def _discard(self, key: str) -> None:
        assert self._store is not None
        self._store.discard(key)

    def _later(self, work: Callable[[], None]) -> None:
        def careful() -> None:
            try:
                work()
            except StoreError as error:
                logger.warning("%s", error)

        self._threads.submit(careful)


class _Asking:
    """One question, which may be answered when nobody waits any more."""

    def __init__(self, store: Store, breaker: Breaker) -> None:
        self._store = store
        self._breaker = breaker
        self._is_late = False

    def heads(self, keys: Sequence[str]) -> list[bytes | None] | None:
        """Return heads; ``None`` if the store does not answer."""
        try:
            found = self._store.has_caches(keys)
        except StoreError as error:
            self._failed(str(error))
            return None
        except BaseException as error:
            self._failed(repr(error))
            raise
        if not self._is_late and self._breaker.succeeded():
            logger.info("the store is asked again")
        return found

    def too_late(self) -> None:
        """Nobody waits for the answer any more."""
        self._is_late = True
        if self._breaker.failed():
            logger.warning("the store is not asked for a while: no answer in time")

    def _failed(self, reason: str) -> None:
        if not self._is_late and self._breaker.failed():
            logger.warning("the store is not asked for a while: %s", reason)


class _Answer(msgspec.Struct):
    """What is read of an encode job's answer."""

    ec_transfer_params: EncodeOutcome | None = None
