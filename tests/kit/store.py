"""A store of encoder outputs: the loader's threads, without threads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest import mock

from prometheus_client import CollectorRegistry

from epd_portable.transfer.circuit_breaker import CircuitBreaker
from epd_portable.transfer.stores import loader
from epd_portable.transfer.stores.metrics import StoreMetrics
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor
from epd_portable.wire.messages import AnyMessage, Grant
from tests.kit.memory import TORN, PoolMemory
from tests.unit.builders import Clock

NAMESPACE = "engines"
TIMEOUT_S = 2.0
READERS = loader._READERS


@dataclass
class _Reading:
    load: Any
    turns: int
    content: str | None
    """Content of the entry when the read began; none without an entry."""


class _Closes:
    """A store that nothing reads: `Shelf` does."""

    def close(self) -> None:
        """Do nothing: no resource is open."""


class Shelf:
    """`StoreLoader` over a store whose reads last as long as a test wants.

    What it does not reproduce: entries' bytes and seals, and what happens between two turns.

    Attributes:
        entries: Items that the store has, of the weights of the pool; emptied with other weights.
        is_blocked: Reads do not end.
        fails: Probability that a read fails.
        seen: Count of events.
        reads: Number of reads that have ended.
    """

    def __init__(self, clock: Clock, pool: PoolMemory, rng: Random, *, fails: float = 0.0) -> None:
        self.entries: set[str] = set()
        self.is_blocked = False
        self.fails = fails
        self.seen: Counter[str] = Counter()
        self.reads = 0
        self._pool, self._rng = pool, rng
        self._reading: list[_Reading] = []
        self._registry = CollectorRegistry()
        peer = PeerDescriptor(
            instance="prefill_decode-0",
            session="prefill_decode-0-life-1",
            host="host",
            device="cpu:0",
            fingerprint="same",
            paths=(PathEndpoint(path="shm"),),
        )
        with mock.patch.object(loader, "_READERS", 0):
            self.loader = loader.StoreLoader(
                _Closes(),  # type: ignore[arg-type]
                None,  # type: ignore[arg-type]
                peer,
                NAMESPACE,
                None,  # type: ignore[arg-type]
                timeout_s=TIMEOUT_S,
                wake=lambda: None,
                breaker=CircuitBreaker(clock=clock, chance=lambda: 0.5),
                metrics=StoreMetrics("pd", self._registry),
                clock=clock,
            )

    @property
    def errors(self) -> int:
        """Loads that ended with an error, as all do that are later than the loader's timeout."""
        value = self._registry.get_sample_value("epd_pd_store_items_total", {"result": "error"})
        assert value is not None
        return int(value)

    @property
    def waiting(self) -> int:
        """Loads that have not ended."""
        return len(self.loader._loads)

    @property
    def idle_slots(self) -> int:
        """Slots that no thread fills, of loads that are over."""
        filled = [each.load for each in self._reading]
        return sum(each.given_up and each not in filled for each in self.loader._loads.values())

    def send(self, message: AnyMessage) -> None:
        """Bring a message of the instance to the loader."""
        if isinstance(message, Grant):
            self._pool.granted(message.slot)
        self.loader.send(message)

    def turn(self) -> None:
        """Let the threads go on for a turn."""
        made = self.loader
        while made._orders and len(self._reading) < READERS:
            load = made._orders.pop(next(iter(made._orders)))
            if made.breaker.allows():
                self._put(load, TORN)
                name = load.mm_hash
                content = self._pool.output(name) if name in self.entries else None
                self._reading.append(_Reading(load, self._rng.choice([0, 0, 1, 3, 60]), content))
            else:
                made._ended.put((load, "unavailable", "the store has not answered lately"))
        for each in list(self._reading):
            each.turns -= 1
            if each.turns < 0 and not self.is_blocked:
                self._reading.remove(each)
                self._end(each.load, each.content)

    def _end(self, load: Any, content: str | None) -> None:
        self.reads += 1
        self.seen["loads that were late"] += load.too_slow
        if self._rng.random() < self.fails:
            self.seen["loads that failed"] += 1
            self.loader._ended.put((load, self._rng.choice(["miss", "corrupt", "error"]), "fault"))
        elif content is not None:
            self._put(load, content)
            self.loader._ended.put((load, "hit", ""))
        else:
            self.loader._ended.put((load, "miss", "the entry is gone"))

    def _put(self, load: Any, content: str) -> None:
        self._pool.write(load.slot, content)


def key(name: str) -> str:
    """Return the key of an item's entry."""
    return f"{NAMESPACE}-{name}"
