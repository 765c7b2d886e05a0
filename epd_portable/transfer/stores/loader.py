"""A PD instance's side of a store: one more producer, which writes into granted slots.

It speaks the control protocol as an encode instance does, without a network: it announces an item
(`StoreLoader.load`), is granted the slot of the item, fills it, and sends *written*. So order,
leases and quarantine of slots are those of every transfer. What differs is a failure:
`NackCode.NOT_STORED` ends its part in the transfer, and the front has an encoder deliver the item.

::

    load ─▶ ANNOUNCED ──Grant──▶ LOADING ──▶ Written
                │                   ├── evicted, damaged, not this engine's ─▶ Nack(NOT_STORED)
                │                   └── too slow ─▶ Nack(NOT_STORED), and Nack(RELEASED) when over
                └── NotNeeded ─▶ end

Threads fill slots; everything else happens in `send` and `receive`, in the receiver's turns. A slot
that no thread has begun to fill is released at once, so that a store which blocks all threads holds
no more slots than there are threads.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from epd_portable.errors import CorruptEntryError, StoreError
from epd_portable.log import trace
from epd_portable.transfer.circuit_breaker import CircuitBreaker
from epd_portable.transfer.registry import STORE
from epd_portable.transfer.stores.base import Store
from epd_portable.transfer.stores.entry import Seal
from epd_portable.transfer.stores.metrics import Ask, StoreMetrics
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

if TYPE_CHECKING:
    from epd_portable.transfer.pool import SharedMemory

logger = logging.getLogger(__name__)

IDENTITY = b"\0store"
"""In place of a ZMQ identity; those of peers are printable."""
_READERS = 2
_BREAKER_OPEN = "the store has not replied lately, and is not queried"
_BLOCKED = f"the store blocks all {_READERS} threads that read it"


@dataclass(slots=True, eq=False)
class _Load:
    """An item to load.

    Attributes:
        tensor: Shape and dtype that the entry must have.
        slot: Once granted, as is ``deadline_s``, when it has taken too long.
        given_up: It is not needed any more, but a thread still fills the slot.
        too_slow: It has taken too long, and the breaker has been informed.
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


@dataclass(eq=False)
class StoreLoader:
    """Fills slots from a store.

    Attributes:
        peer: The instance; the loader announces as its part.
        namespace: Of the engine, see `Seal.namespace`.
        timeout_s: Longest time from the grant of a slot to its *written*.
        wake: Has the receiver take its turn.
        breaker: Opens when the store does not reply.
    """

    store: Store
    seal: Seal
    peer: PeerDescriptor
    namespace: str
    memory: SharedMemory
    _: KW_ONLY
    timeout_s: float
    wake: Callable[[], None]
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    metrics: StoreMetrics = field(default_factory=lambda: StoreMetrics("pd"))
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._own_peer = msgspec.structs.replace(
            self.peer, instance=STORE, paths=(PathEndpoint(path=STORE),)
        )
        self._numbers = itertools.count(1)
        self._loads: dict[int, _Load] = {}
        self._outbox: list[AnyMessage] = []
        self._orders: dict[int, _Load] = {}
        """Loads with a slot that no thread has begun to fill; oldest first, under ``_ordered``."""
        self._ordered = threading.Condition()
        self._closing = False
        self._ended: SimpleQueue[tuple[_Load, Ask, str]] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"epd-store-{number}", daemon=True)
            for number in range(_READERS)
        ]
        for thread in self._threads:
            thread.start()

    def is_its_own(self, producer: PeerDescriptor) -> bool:
        """Return whether a producer is this loader."""
        return producer is self._own_peer

    # -- the receiver's turns --------------------------------------------------------------------

    def load(self, transfer_id: str, key: str, mm_hash: str, tensor: TensorSpec) -> AnyMessage:
        """Begin to load an item; return its announcement, or a `Nack`.

        The entry must be the engine's item ``mm_hash`` of that shape and dtype.
        """
        load = _Load(transfer_id, next(self._numbers), key, mm_hash, tensor)
        if not key.startswith(f"{self.namespace}-"):
            self.metrics.asked("corrupt")
            return _not_stored(load, "its entry is of engines that serve something else")
        if reason := self._unavailable():
            self.metrics.asked("unavailable")
            return _not_stored(load, reason)
        self._loads[load.attempt] = load
        return Announce(
            transfer_id=transfer_id,
            attempt=load.attempt,
            mm_hash=mm_hash,
            tensor=tensor,
            producer=self._own_peer,
        )

    def send(self, message: AnyMessage) -> None:
        """Process the receiver's reply to an announcement."""
        load = self._loads.get(message.attempt)
        if isinstance(message, Grant):
            if load is not None and load.slot is None:
                self._granted(load, message.slot)
        elif isinstance(message, Abort):
            if load is None or load.slot is None:
                self._loads.pop(message.attempt, None)
                self._outbox.append(_released(message))
            else:
                self._give_up(load)
        elif isinstance(message, NotNeeded | Nack) and load is not None and load.slot is None:
            del self._loads[load.attempt]

    def receive(self) -> list[tuple[bytes, AnyMessage]]:
        """Return ``(IDENTITY, message)`` of the loader's messages since the last call."""
        while not self._ended.empty():
            self._end(*self._ended.get())
        now = self.clock()
        for load in list(self._loads.values()):
            if load.slot is None or load.too_slow or now < load.deadline_s:
                continue
            load.too_slow = True
            reason = f"the store has not brought it in {self.timeout_s:g} s (store.timeout_ms)"
            self._open_breaker(reason)
            if not load.given_up:
                self.metrics.asked("error")
                self._outbox.append(_not_stored(load, reason))
                self._give_up(load)
        messages, self._outbox = self._outbox, []
        return [(IDENTITY, message) for message in messages]

    def close(self) -> None:
        """Stop; does not wait for a thread that a disk blocks."""
        with self._ordered:
            self._closing = True
            self._ordered.notify_all()
        for thread in self._threads:
            thread.join(self.timeout_s)
        self.store.close()

    # --------------------------------------------------------------------------------------------

    def _unavailable(self) -> str:
        """Return why no item can be loaded now; an empty string if one can."""
        blocked = sum(each.too_slow for each in self._loads.values())
        if blocked >= _READERS:
            return _BLOCKED
        state = self.breaker.state
        # One at a time tries a store that did not reply.
        tried = any(each.slot and not each.given_up for each in self._loads.values())
        return _BREAKER_OPEN if state == "open" or (state == "half_open" and tried) else ""

    def _granted(self, load: _Load, slot: SlotDescriptor) -> None:
        """Have a thread fill a slot, unless that cannot be any more since the announcement."""
        if reason := self._unavailable():
            del self._loads[load.attempt]
            self.metrics.asked("unavailable")
            self._outbox += [_not_stored(load, reason), _released(load)]
            return
        load.slot = slot
        load.deadline_s = self.clock() + self.timeout_s
        with self._ordered:
            self._orders[load.attempt] = load
            self._ordered.notify()

    def _give_up(self, load: _Load) -> None:
        """Release a slot, now or when the thread that fills it has ended."""
        load.given_up = True
        with self._ordered:
            is_filled = self._orders.pop(load.attempt, None) is None
        if not is_filled:
            del self._loads[load.attempt]
            self._outbox.append(_released(load))

    def _end(self, load: _Load, result: Ask, reason: str) -> None:
        """End a load in its thread; ``reason`` is empty for a hit."""
        assert load.slot is not None
        del self._loads[load.attempt]
        if not load.too_slow:
            if result == "error":
                self._open_breaker(reason)
            elif result != "unavailable" and self.breaker.close():
                logger.info("items are loaded from the store again")
        self.metrics.breaker(self.breaker)
        if load.given_up:
            self._outbox.append(_released(load))
            return
        self.metrics.asked(result)
        if result != "hit":
            self._outbox += [_not_stored(load, reason), _released(load)]
            return
        self.metrics.loaded_bytes.inc(load.tensor.nbytes)
        self._outbox.append(
            Written(
                transfer_id=load.transfer_id,
                attempt=load.attempt,
                generation=load.slot.generation,
            )
        )

    def _open_breaker(self, reason: str) -> None:
        if self.breaker.failed():
            logger.warning("items are not loaded from the store for a while: %s", reason)
        self.metrics.breaker(self.breaker)

    # -- the threads -----------------------------------------------------------------------------

    def _run(self) -> None:
        while (load := self._next()) is not None:
            self._ended.put((load, *self._attempt(load)))
            self.wake()

    def _next(self) -> _Load | None:
        """Block until there is a slot to fill; return ``None`` at the end."""
        with self._ordered:
            self._ordered.wait_for(lambda: self._orders or self._closing)
            return None if self._closing else self._orders.pop(next(iter(self._orders)))

    def _attempt(self, load: _Load) -> tuple[Ask, str]:
        """Fill a slot; return the result, with its reason unless it is a hit."""
        if not self.breaker.allows():
            return "unavailable", _BREAKER_OPEN
        try:
            found = self._fill(load)
        except CorruptEntryError as error:
            return "corrupt", str(error)
        except StoreError as error:
            return "error", str(error)
        except Exception as error:
            logger.exception("item %s could not be loaded", load.mm_hash)
            return "error", repr(error)
        if not found:
            return "miss", f"entry {load.key} is not in the store any more"
        return "hit", ""

    def _fill(self, load: _Load) -> bool:
        """Fill a slot; return whether there is an entry."""
        assert load.slot is not None
        begin_s = time.monotonic()
        into = self.memory.buffer(load.slot.offset, load.slot.nbytes)
        try:
            raw = self.store.load_cache(load.key, into)
            if raw is None:
                return False
            head = self.seal.open(raw, load.key)
            if (head.mm_hash, head.tensor) != (load.mm_hash, load.tensor):
                raise CorruptEntryError(
                    f"entry {load.key} is {head.mm_hash} {head.tensor}, the request's item is "
                    f"{load.mm_hash} {load.tensor}"
                )
            self.seal.check(head, into)
        except CorruptEntryError:
            self.store.discard(load.key)
            raise
        trace(
            "store.loaded",
            mm_hash=load.mm_hash,
            transfer=load.transfer_id,
            nbytes=into.nbytes,
            load_s=time.monotonic() - begin_s,
        )
        return True


def _not_stored(load: _Load, detail: str) -> Nack:
    return _nack(load, NackCode.NOT_STORED, detail)


def _released(of: _Load | AnyMessage) -> Nack:
    return _nack(of, NackCode.RELEASED, "the store does not write there any more")


def _nack(of: _Load | AnyMessage, code: NackCode, detail: str) -> Nack:
    return Nack(transfer_id=of.transfer_id, attempt=of.attempt, code=code, detail=detail)
