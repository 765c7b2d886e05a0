"""`Store`: the small interface that every kind of store has, and which kinds there are.

Three parts use it, each with the verbs of its side of vLLM's ``ECConnectorBase``: the router asks
`Store.has_caches` before it chooses an encoder; an encode instance's worker calls
`Store.save_caches` behind everything else (`epd_portable.connector.stores.writer`); a PD instance
calls `Store.load_cache` for a slot that its preallocator gave
(`epd_portable.connector.stores.loader`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from epd_portable.config.store import StoreSection

KINDS = {
    "redis": "epd_portable.connector.stores.redis:RedisStore",
    "file": "epd_portable.connector.stores.file:FileStore",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry, to be written.

    Attributes:
        key: See `epd_portable.connector.stores.entry.Seal.key`.
        head: Sealed.
        payload: Contiguous bytes, read until the call returns and not copied before.
        mm_hash: The engine's identifier.
        dtype: Of the payload; a key of `epd_portable.wire.descriptors.DTYPE_BYTES`.
        shape: Of the payload.
    """

    key: str
    head: bytes
    payload: memoryview
    mm_hash: str
    dtype: str
    shape: tuple[int, ...]


class Store(ABC):
    """Keeps entries by key. Every method blocks, and may be called by several threads.

    Each exchange with the server or the disk is bounded by ``timeout_ms`` where that is possible;
    callers keep a time limit of their own (a disk can block for ever).

    A store trusts nobody: what comes out of it is checked by the caller, by
    `epd_portable.connector.stores.entry.Seal`.
    """

    @abstractmethod
    def has_caches(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the heads that lie under some keys, and note that they are used.

        Raises:
            StoreError: It cannot be reached, or not in time.
        """

    @abstractmethod
    def save_caches(self, entries: Sequence[Entry]) -> int:
        """Write entries, each whole or not at all; make room for them.

        Returns:
            How many entries had to go for them.

        Raises:
            StoreFullError: There is no room, whatever goes; some may be written.
            StoreError: It cannot be reached, or not in time; some may be written.
        """

    @abstractmethod
    def load_cache(self, key: str, into: memoryview) -> bytes | None:
        """Read an entry's payload into a buffer, and return its head; ``None`` if it has gone.

        Args:
            key: Of the entry.
            into: Writable bytes, exactly as many as the payload should have; undefined after an
                error.

        Raises:
            CorruptEntryError: The payload has another size.
            StoreError: It cannot be reached, or not in time.
        """

    @abstractmethod
    def discard(self, key: str) -> None:
        """Remove an entry that was found to be damaged, so that it is written anew.

        Raises:
            StoreError: It cannot be reached, or not in time.
        """

    @abstractmethod
    def check(self) -> str:
        """Return what the store says of itself, in a few words.

        Raises:
            StoreError: It cannot be reached, or cannot be used.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up connections; calls that are under way fail."""


def make_store(section: StoreSection) -> Store:
    """Return the store that a configuration means; connects to nothing.

    Raises:
        ConfigError: Its library is not installed, or its password cannot be read.
    """
    module, _, name = KINDS[section.kind].partition(":")
    made: Store = getattr(importlib.import_module(module), name)(section)
    return made
