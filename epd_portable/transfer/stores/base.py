"""`Store`: the interface of every kind of store, and the table of kinds.

Its verbs are those of vLLM's ``ECConnectorBase``: the front calls `Store.has_caches` before it
chooses an encoder, an encode instance `Store.save_caches` (`epd_portable.encode.store_writer`),
a PD instance `Store.load_cache` for a granted slot (`epd_portable.transfer.stores.loader`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from epd_portable.config.store import StoreSection

KINDS = {
    "redis": "epd_portable.transfer.stores.redis:RedisStore",
    "file": "epd_portable.transfer.stores.file:FileStore",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An entry, to be written.

    Attributes:
        key: See `epd_portable.transfer.stores.entry.Seal.key`.
        head: Sealed.
        payload: Contiguous bytes of ``shape`` and ``dtype``, read until the call returns.
        dtype: A key of `epd_portable.wire.descriptors.DTYPE_BYTES`.
    """

    key: str
    head: bytes
    payload: memoryview
    mm_hash: str
    dtype: str
    shape: tuple[int, ...]


class Store(ABC):
    """Keeps entries by key. Every method blocks, and may be called by several threads.

    Each exchange with the server or the disk is bounded by ``timeout_ms`` where that is possible,
    else by the caller (a disk can block for ever), which checks entries by a `Seal`. Every method
    raises `StoreError` when the store cannot be reached, or not in time.
    """

    @abstractmethod
    def has_caches(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the heads of some keys, and record their use."""

    @abstractmethod
    def save_caches(self, entries: Sequence[Entry]) -> int:
        """Write entries, each whole or not at all; return how many were evicted for them.

        After any `StoreError`, `StoreFullError` among them, some entries may be written.
        """

    @abstractmethod
    def load_cache(self, key: str, into: memoryview) -> bytes | None:
        """Read an entry's payload into a buffer, and return its head; ``None`` if there is none.

        Raises:
            CorruptEntryError: The payload has another size than ``into``, which is undefined after
                any error.
        """

    @abstractmethod
    def discard(self, key: str) -> None:
        """Remove a damaged entry, so that it is written again."""

    @abstractmethod
    def check(self) -> str:
        """Return version and use of the store, for people."""

    @abstractmethod
    def close(self) -> None:
        """Close connections; calls that are under way fail."""


def make_store(section: StoreSection) -> Store:
    """Return the configured store; does not connect.

    Raises:
        ConfigError: Its library is not installed, or its password cannot be read.
    """
    module, _, name = KINDS[section.kind].partition(":")
    made: Store = getattr(importlib.import_module(module), name)(section)
    return made
