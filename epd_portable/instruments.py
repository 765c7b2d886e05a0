"""Metrics of one part of a process, in Prometheus form; each is listed in ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class Instruments:
    """Base of what one part of a process counts.

    Names of labels are words with spaces between them. Label values come from the literals and path
    names of this package, never from peers.

    Args:
        registry: Where they can be read in this process; ``None`` makes one.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()

    def _counter(
        self, name: str, meaning: str, labels: str = "", values: Iterable[str] = ()
    ) -> Counter:
        """Return a counter that starts at zero for each of ``values`` of its one label."""
        counter = Counter(name, meaning, labels.split(), registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def _seconds(
        self, name: str, meaning: str, labels: str = "", buckets: Sequence[float] = SECONDS
    ) -> Histogram:
        return Histogram(name, meaning, labels.split(), buckets=buckets, registry=self.registry)

    def _gauge(
        self,
        name: str,
        meaning: str,
        labels: str = "",
        *,
        mode: Literal["livesum", "livemax"] = "livesum",
    ) -> Gauge:
        """Return a gauge; ``mode`` merges those of several processes."""
        return Gauge(name, meaning, labels.split(), registry=self.registry, multiprocess_mode=mode)
