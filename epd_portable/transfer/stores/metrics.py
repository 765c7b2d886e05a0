"""Metrics of the users of a store; listed in ``docs/metrics.md``."""

from __future__ import annotations

from typing import Literal, get_args

from prometheus_client import CollectorRegistry

from epd_portable.instruments import Instruments
from epd_portable.transfer.circuit_breaker import CircuitBreaker

Side = Literal["front", "encode", "pd"]
Ask = Literal["hit", "miss", "corrupt", "error", "unavailable"]
"""Result for one item. ``error``: the store did not reply, or too late. ``unavailable``: not
requested, because the breaker was open or the key not known yet."""
Drop = Literal["full", "error", "unavailable"]
"""Reason for which an output was not written. ``full``: no space in the queue or the store."""

_STATES = {"closed": 0, "half_open": 1, "open": 2}


class StoreMetrics(Instruments):
    """Metrics of one side: of writes on encode instances, of look-ups and loads elsewhere.

    Args:
        side: Part of the metrics' names.
        registry: Default: a new one.

    Attributes:
        writes: Of an encode instance, as are the others but for ``loaded_bytes``, a PD instance's.
    """

    def __init__(self, side: Side, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        name, counter = f"epd_{side}_store_{{}}".format, self._counter
        if side == "encode":
            self.writes = counter(name("writes"), "Entries written.")
            self.written_bytes = counter(name("written_bytes"), "Bytes of entries written.")
            self.known = counter(name("known"), "Outputs whose entry existed.")
            self.evictions = counter(name("evictions"), "Entries evicted.")
            text = "Outputs that were not written, by reason."
            self._drops = counter(name("drops"), text, "reason", get_args(Drop))
            text = "Bytes of outputs that wait to be written."
            self.queued_bytes = self._gauge(name("queued_bytes"), text)
        else:
            text = "Items by result of the query of the store."
            self._asks = counter(name("items"), text, "result", get_args(Ask))
        if side == "pd":
            self.loaded_bytes = counter(name("loaded_bytes"), "Bytes loaded.")
        text = "State of the circuit breaker: 0 closed, 1 half open, 2 open."
        self._state = self._gauge(name("breaker"), text, mode="livemax")

    def asked(self, result: Ask, count: int = 1) -> None:
        """Items were looked up or loaded."""
        self._asks.labels(result).inc(count)

    def dropped(self, reason: Drop, count: int = 1) -> None:
        """Count outputs that were not written."""
        self._drops.labels(reason).inc(count)

    def breaker(self, breaker: CircuitBreaker) -> None:
        """State of the side's breaker."""
        self._state.set(_STATES[breaker.state])
