"""Metrics of the users of a store; listed in ``docs/metrics.md``."""

from __future__ import annotations

from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from epd_portable.transfer.circuit_breaker import CircuitBreaker

Side = Literal["front", "encode", "pd"]
Ask = Literal["hit", "miss", "corrupt", "error", "unavailable"]
"""Result for one item. ``error``: the store did not answer, or too late. ``unavailable``: not
asked, because the breaker was open or the key not known yet."""
Drop = Literal["full", "error", "unavailable"]
"""Why an output was not written. ``full``: no room in the queue or the store."""

_STATES = {"closed": 0, "half_open": 1, "open": 2}


class StoreMetrics:
    """Metrics of one side: of writes on encode instances, of look-ups and loads elsewhere.

    Args:
        side: Part of the metrics' names.
        registry: Default: a new one.

    Attributes:
        writes: Of an encode instance, as are the others but for ``loaded_bytes``, a PD instance's.
    """

    def __init__(self, side: Side, registry: CollectorRegistry | None = None) -> None:
        registry = registry or CollectorRegistry()
        name = f"epd_{side}_store"

        def counter(word: str, text: str, label: str = "", values: Any = None) -> Counter:
            made = Counter(f"{name}_{word}", text, (label,) if label else (), registry=registry)
            for value in get_args(values):
                made.labels(value)
            return made

        def gauge(word: str, text: str, mode: Literal["livesum", "livemax"]) -> Gauge:
            return Gauge(f"{name}_{word}", text, registry=registry, multiprocess_mode=mode)

        if side == "encode":
            self.writes = counter("writes", "Entries written.")
            self.written_bytes = counter("written_bytes", "Bytes of entries written.")
            self.known = counter("known", "Outputs whose entry existed.")
            self.evictions = counter("evictions", "Entries evicted.")
            self._drops = counter(
                "drops", "Outputs that were not written, by reason.", "reason", Drop
            )
            self.queued_bytes = gauge(
                "queued_bytes", "Bytes of outputs that wait to be written.", "livesum"
            )
        else:
            text = "Items by result of the query of the store."
            self._asks = counter("items", text, "result", Ask)
        if side == "pd":
            self.loaded_bytes = counter("loaded_bytes", "Bytes loaded.")
        self._state = gauge(
            "breaker", "State of the circuit breaker: 0 closed, 1 half open, 2 open.", "livemax"
        )

    def asked(self, result: Ask, count: int = 1) -> None:
        """Items were looked up or loaded."""
        self._asks.labels(result).inc(count)

    def dropped(self, reason: Drop, count: int = 1) -> None:
        """Outputs were not written."""
        self._drops.labels(reason).inc(count)

    def breaker(self, breaker: CircuitBreaker) -> None:
        """State of the side's breaker."""
        self._state.set(_STATES[breaker.state])
