"""A PD instance's side of a store: one more producer, which writes into granted slots.

It speaks the control protocol as an encode instance does, without a network: it announces an item
(`StoreLoader.load`), is granted the slot that the preallocator gave, fills it, and says *written*.
So order, leases and quarantine of slots are those of every transfer. What differs is a failure:
`NackCode.NOT_STORED` ends its part in the transfer, and the router has an encoder bring the item.

::

    load ─▶ ANNOUNCED ──Grant──▶ LOADING ──▶ Written
                │                   ├── evicted, damaged, not this engine's ─▶ Nack(NOT_STORED)
                │                   └── too slow ─▶ Nack(NOT_STORED), and Nack(RELEASED) when over
                └── NotNeeded ─▶ end

Threads fill slots; everything else happens in `send` and `receive`, in the receiver's turns.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from epd_portable.connector.registry import STORE
from epd_portable.connector.stores.base import Store
from epd_portable.connector.stores.breaker import Breaker
from epd_portable.connector.stores.entry import Seal
from epd_portable.connector.stores.metrics import Ask, StoreMetrics
from epd_portable.errors import CorruptEntryError, StoreError
from epd_portable.log import trace
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor, SlotDescriptor, TensorSpec
from epd_portable.wire.messages import (
    Abort,
    Announce,
    AnyMessage,
    Grant,
    Nack,
    NackCode,
    NotNeeded,
    Written,
)

logger = logging.getLogger(__name__)

IDENTITY = b"\0store"
"""In place of a ZMQ identity; those of peers are printable."""
_READERS = 2


class SlotMemory(Protocol):
    """Where slots are."""

    def buffer(self, offset: int, nbytes: int) -> memoryview:
        """Return some of its bytes, writable."""
        ...


@dataclass(slots=True, eq=False)
class _Load:
    """An item that the store is to bring.

    Attributes:
        transfer_id: Its way here.
        attempt: The loader's number for it.
        key: Of the entry.
        mm_hash: The engine's identifier.
        tensor: What it must be.
        slot: Once granted.
        deadline_s: When it has taken too long; once granted.
        given_up: Nobody waits for it any more; it goes on only because a thread is at it.
        too_slow: It was given up for that, and the breaker knows.
    """

    transfer_id: str
    attempt: int
    key: str
    mm_hash: str
    tensor: TensorSpec
    slot: SlotDescriptor | None = None
    deadline_s: float = 0.0
    given_up: bool = False
    too_slow: bool = False


class StoreLoader:
    """Fills slots from a store.

    Args:
        store: Where from.
        seal: Of the deployment.
        peer: Of the instance that loads; whose namespace and session it has.
        namespace: Of the engine, see `Seal.namespace`.
        memory: Where slots are.
        timeout_s: Longest time from the grant of a slot to its *written*.
        wake: Has the receiver take its turn.
        digest: Returns what *written* says of a slot's bytes, for the workers to check; or empty.
        breaker: Opens when the store does not answer.
        metrics: Counts what happens; ``None`` counts where nobody looks.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        seal: Seal,
        peer: PeerDescriptor,
        namespace: str,
        memory: SlotMemory,
        *,
        timeout_s: float,
        wake: Callable[[], None],
        digest: Callable[[memoryview], str] = lambda data: "",
        breaker: Breaker | None = None,
        metrics: StoreMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._seal = seal
        self._peer = PeerDescriptor(
            instance=STORE,
            session=peer.session,
            host=peer.host,
            device=peer.device,
            fingerprint=peer.fingerprint,
            paths=(PathEndpoint(path=STORE),),
        )
        self._namespace = namespace
        self._memory = memory
        self._timeout_s = timeout_s
        self._wake = wake
        self._digest = digest
        self._breaker = breaker or Breaker()
        self._metrics = metrics or StoreMetrics("pd")
        self._clock = clock
        self._numbers = itertools.count(1)
        self._loads: dict[int, _Load] = {}
        self._outbox: list[AnyMessage] = []
        self._orders: SimpleQueue[_Load | None] = SimpleQueue()
        self._ended: SimpleQueue[tuple[_Load, str, Exception | None]] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"epd-store-{number}", daemon=True)
            for number in range(_READERS)
        ]
        for thread in self._threads:
            thread.start()

    def is_its_own(self, producer: PeerDescriptor) -> bool:
        """Tell whether a producer is this loader."""
        return producer is self._peer

    # -- what the receiver says, in its turns ----------------------------------------------------

    def load(self, transfer_id: str, key: str, mm_hash: str, tensor: TensorSpec) -> AnyMessage:
        """Begin to bring an item; return what to say of it at once, see `IDENTITY`.

        Args:
            transfer_id: Of the request that expects it.
            key: Of the entry, as the router says.
            mm_hash: The engine's identifier.
            tensor: What the request's item must be.
        """
        load = _Load(transfer_id, next(self._numbers), key, mm_hash, tensor)
        if not key.startswith(f"{self._namespace}-"):
            self._metrics.asked("poisoned")
            return self._nack(load, "its entry is of engines that serve something else")
        if self._breaker.state == "open":
            self._metrics.asked("skipped")
            return self._nack(load, "the store did not answer lately, and is left alone")
        self._loads[load.attempt] = load
        return Announce(
            transfer_id=transfer_id,
            attempt=load.attempt,
            mm_hash=mm_hash,
            tensor=tensor,
            producer=self._peer,
        )

    def send(self, message: AnyMessage) -> None:
        """Take in what the receiver answers to an announcement."""
        load = self._loads.get(message.attempt)
        if isinstance(message, Grant):
            if load is not None and load.slot is None:
                load.slot = message.slot
                load.deadline_s = self._clock() + self._timeout_s
                self._orders.put(load)
        elif isinstance(message, Abort):
            if load is None or load.slot is None:
                self._loads.pop(message.attempt, None)
                self._outbox.append(self._released(message.transfer_id, message.attempt))
            else:
                load.given_up = True
        elif isinstance(message, NotNeeded | Nack) and load is not None and load.slot is None:
            del self._loads[load.attempt]

    def receive(self) -> list[tuple[bytes, AnyMessage]]:
        """Return what the loader says since it was asked last."""
        while not self._ended.empty():
            self._end(*self._ended.get())
        now = self._clock()
        for load in self._loads.values():
            if load.slot is not None and not load.given_up and now >= load.deadline_s:
                self._too_slow(load)
        said, self._outbox = self._outbox, []
        return [(IDENTITY, message) for message in said]

    def close(self) -> None:
        """Stop; a thread that a disk blocks is left alone."""
        for _ in self._threads:
            self._orders.put(None)
        for thread in self._threads:
            thread.join(self._timeout_s)
        self._store.close()

    # --------------------------------------------------------------------------------------------

    def _too_slow(self, load: _Load) -> None:
        load.given_up = load.too_slow = True
        reason = f"the store has not brought it within {self._timeout_s:g} s (store.timeout_ms)"
        self._metrics.asked("failed")
        self._failed(reason)
        self._outbox.append(self._nack(load, reason))

    def _end(self, load: _Load, digest: str, error: Exception | None) -> None:
        """A thread has ended with a load."""
        assert load.slot is not None
        del self._loads[load.attempt]
        answered = error is None or isinstance(error, CorruptEntryError | _GoneError)
        if answered and not load.too_slow and self._breaker.succeeded():
            logger.info("items are loaded from the store again")
        elif not (answered or load.too_slow or isinstance(error, _SkippedError)):
            self._failed(str(error) or repr(error))
        self._metrics.breaker(self._breaker)
        released = self._released(load.transfer_id, load.attempt)
        if load.given_up:
            self._outbox.append(released)
        elif error is None:
            self._metrics.asked("hit")
            self._metrics.loaded(load.tensor.nbytes)
            written = Written(
                transfer_id=load.transfer_id,
                attempt=load.attempt,
                generation=load.slot.generation,
                digest=digest,
            )
            self._outbox.append(written)
        else:
            self._metrics.asked(_result(error))
            self._outbox += [self._nack(load, str(error) or repr(error)), released]

    def _failed(self, reason: str) -> None:
        if self._breaker.failed():
            logger.warning("items are not loaded from the store for a while: %s", reason)
        self._metrics.breaker(self._breaker)

    def _nack(self, load: _Load, detail: str) -> Nack:
        return Nack(
            transfer_id=load.transfer_id,
            attempt=load.attempt,
            code=NackCode.NOT_STORED,
            detail=detail,
        )

    def _released(self, transfer_id: str, attempt: int) -> Nack:
        detail = "the store writes there no more"
        return Nack(transfer_id=transfer_id, attempt=attempt, code=NackCode.RELEASED, detail=detail)

    # -- the threads -----------------------------------------------------------------------------

    def _run(self) -> None:
        while (load := self._orders.get()) is not None:
            digest, error = "", None
            try:
                if load.given_up:
                    raise _SkippedError("nobody waits for it any more")
                if not self._breaker.allows():
                    raise _SkippedError("the store did not answer lately, and is left alone")
                digest = self._load(load)
            except Exception as caught:
                error = caught
                if not isinstance(caught, StoreError):
                    logger.exception("item %s could not be loaded", load.mm_hash)
            self._ended.put((load, digest, error))
            self._wake()

    def _load(self, load: _Load) -> str:
        """Fill a slot; return the digest of its bytes, if workers are to check them.

        Raises:
            CorruptEntryError: What is there is not the item; it has been removed.
            StoreError: Nothing is there, or the store does not answer.
        """
        assert load.slot is not None
        begin_s = time.monotonic()
        into = self._memory.buffer(load.slot.offset, load.slot.nbytes)
        try:
            raw = self._store.load_cache(load.key, into)
            if raw is None:
                raise _GoneError(f"entry {load.key} has gone from the store")
            head = self._seal.open(raw, load.key)
            if (head.mm_hash, head.tensor) != (load.mm_hash, load.tensor):
                raise CorruptEntryError(
                    f"entry {load.key} is {head.mm_hash} {head.tensor}, the request's item is "
                    f"{load.mm_hash} {load.tensor}"
                )
            self._seal.check(head, into)
        except CorruptEntryError:
            self._store.discard(load.key)
            raise
        trace(
            "store.loaded",
            mm_hash=load.mm_hash,
            transfer=load.transfer_id,
            nbytes=into.nbytes,
            load_s=time.monotonic() - begin_s,
        )
        return self._digest(into)


class _GoneError(StoreError):
    """The store is well, and the entry not there any more."""


class _SkippedError(StoreError):
    """The store was not asked."""


def _result(error: Exception) -> Ask:
    kinds: tuple[tuple[type[Exception], Ask], ...] = (
        (CorruptEntryError, "poisoned"),
        (_GoneError, "miss"),
        (_SkippedError, "skipped"),
    )
    return next((result for kind, result in kinds if isinstance(error, kind)), "failed")
