"""A store in this process, whose answers a test can hold back or spoil."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from epd_portable.config.secret import Secret
from epd_portable.errors import CorruptEntryError, StoreError
from epd_portable.transfer.stores.base import Entry, Store
from epd_portable.transfer.stores.entry import Seal
from epd_portable.wire.descriptors import TensorSpec

SEAL = Seal(Secret("s" * 40))
NAMESPACE = SEAL.namespace("model")
SPEC = TensorSpec(shape=(4, 8), dtype="float32")
DEADLINE_S = 30.0


def key(name: str) -> str:
    return SEAL.key(NAMESPACE, name, "image")


def entry(name: str, *, tensor: TensorSpec = SPEC, fill: int = 1) -> Entry:
    payload = memoryview(bytes([fill]) * tensor.nbytes)
    return SEAL.entry(payload, key=key(name), mm_hash=name, modality="image", tensor=tensor)


class MemoryStore(Store):
    """Keeps everything; nothing is bounded and nothing goes.

    Attributes:
        entries: By key.
        gate: While it is not set, nothing is answered.
        error: Is raised by everything.
        asked: How often it was asked for anything.
        batches: Numbers of entries that were written together.
        discarded: Keys.
        evicts: How many others it says to have removed with each call that writes.
    """

    evicts = 0

    def __init__(self, *entries: Entry) -> None:
        self.entries = {each.key: (each.head, bytes(each.payload)) for each in entries}
        self.gate = threading.Event()
        self.gate.set()
        self.error: StoreError | None = None
        self.asked = 0
        self.batches: list[int] = []
        self.discarded: list[str] = []

    def _answer(self) -> None:
        self.asked += 1
        assert self.gate.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error

    def has_caches(self, keys: Sequence[str]) -> list[bytes | None]:
        self._answer()
        return [self.entries[each][0] if each in self.entries else None for each in keys]

    def save_caches(self, entries: Sequence[Entry]) -> int:
        self._answer()
        self.batches.append(len(entries))
        self.entries |= {each.key: (each.head, bytes(each.payload)) for each in entries}
        return self.evicts

    def load_cache(self, key: str, into: memoryview) -> bytes | None:
        self._answer()
        if key not in self.entries:
            return None
        head, payload = self.entries[key]
        if len(payload) != into.nbytes:
            raise CorruptEntryError("its size")
        into[:] = payload
        return head

    def discard(self, key: str) -> None:
        self.discarded.append(key)
        self.entries.pop(key, None)

    def check(self) -> str:
        return "here"

    def close(self) -> None:
        self.gate.set()
