"""Metrics of the three users of a store; listed in ``docs/metrics.md``."""

from __future__ import annotations

from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from epd_portable.connector.stores.breaker import Breaker

Side = Literal["router", "encode", "pd"]
Ask = Literal["hit", "miss", "corrupt", "error", "unavailable"]
"""Result for one item. ``error``: the store did not answer, or too late. ``unavailable``: not
asked, because the breaker was open or the key not known yet."""
Drop = Literal["full", "error", "unavailable"]
"""Why an output was not written. ``full``: no room in the queue or the store."""

_STATES = {"closed": 0, "half_open": 1, "open": 2}


class StoreMetrics:
    """Metrics of one side.

    Args:
        side: Part of the metrics' names.
        registry: Default: a new one.
        asks: With metrics of look-ups and loads.
        writes: With metrics of writes.
    """

    def __init__(
        self,
        side: Side,
        registry: CollectorRegistry | None = None,
        *,
        asks: bool = True,
        writes: bool = False,
    ) -> None:
        registry = registry or CollectorRegistry()
        name = f"epd_{side}_store"
        if asks:
            self._asks = Counter(
                f"{name}_items",
                "Items that the store was asked for, by what came of it.",
                ("result",),
                registry=registry,
            )
            for result in get_args(Ask):
                self._asks.labels(result)
        if side == "pd":
            self._loaded = Counter(f"{name}_loaded_bytes", "Bytes loaded.", registry=registry)
        if writes:
            self._writes = Counter(f"{name}_writes", "Entries written.", registry=registry)
            self._written = Counter(f"{name}_written_bytes", "Their bytes.", registry=registry)
            self._known = Counter(
                f"{name}_known", "Outputs whose entry was there already.", registry=registry
            )
            self._evicted = Counter(
                f"{name}_evictions", "Entries removed to make room.", registry=registry
            )
            self._drops = Counter(
                f"{name}_drops",
                "Outputs that were not written, by reason.",
                ("reason",),
                registry=registry,
            )
            for reason in get_args(Drop):
                self._drops.labels(reason)
            self._queued = Gauge(
                f"{name}_queued_bytes",
                "Bytes of outputs that wait to be written.",
                registry=registry,
                multiprocess_mode="livesum",
            )
        self._state = Gauge(
            f"{name}_breaker",
            "State of the circuit breaker: 0 closed, 1 half open, 2 open.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._state.set(0)

    def asked(self, result: Ask, count: int = 1) -> None:
        """Items were looked up or loaded."""
        self._asks.labels(result).inc(count)

    def loaded(self, nbytes: int) -> None:
        """An item was loaded."""
        self._loaded.inc(nbytes)

    def wrote(self, count: int, nbytes: int, evicted: int) -> None:
        """Entries were written, others removed for them."""
        self._writes.inc(count)
        self._written.inc(nbytes)
        self._evicted.inc(evicted)

    def known(self) -> None:
        """An output's entry was there already."""
        self._known.inc()

    def dropped(self, reason: Drop, count: int = 1) -> None:
        """Outputs were not written."""
        self._drops.labels(reason).inc(count)

    def queued(self, nbytes: int) -> None:
        """Bytes that wait to be written."""
        self._queued.set(nbytes)

    def breaker(self, breaker: Breaker) -> None:
        """State of the side's breaker."""
        self._state.set(_STATES[breaker.state])
