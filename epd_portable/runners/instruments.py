"""Makes what an instance counts with, in Prometheus form.

`epd_portable.vllm_plugin.exposition` brings it to the page that the instance serves.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class Instruments:
    """Base of what one part of an instance counts.

    Label values come from the literals and path names of this package, never from peers.

    Args:
        registry: Where they can be read in this process; ``None`` makes one.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry or CollectorRegistry()

    def _counter(
        self, name: str, meaning: str, label: str = "", values: Iterable[str] = ()
    ) -> Counter:
        """Return a counter that starts at zero for each of ``values`` of its label."""
        labels = (label,) if label else ()
        counter = Counter(name, meaning, labels, registry=self._registry)
        for value in values:
            counter.labels(value)
        return counter

    def _seconds(self, name: str, meaning: str, label: str = "") -> Histogram:
        labels = (label,) if label else ()
        return Histogram(name, meaning, labels, buckets=SECONDS, registry=self._registry)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        """Return a gauge; those of several processes are added up."""
        return Gauge(name, meaning, registry=self._registry, multiprocess_mode="sum")
