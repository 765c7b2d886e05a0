"""What the engine front counts beyond vLLM's own metrics of each engine."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epd_portable.delivery.instances import EndpointPool

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class FrontMetrics:
    """Counters of one front, and the state of its engines.

    Attributes:
        items: By `ItemResult`.
    """

    def __init__(self, pool: EndpointPool) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Engines(pool))
        self.items = Counter(
            "epd_front_items",
            "Media items by what became of them.",
            ("outcome",),
            registry=self.registry,
        )
        self.elastic = Counter(
            "epd_front_elastic_items",
            "Items that the engine that answers encodes by choice, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self.sent_again = Counter(
            "epd_front_sent_again",
            "Requests that were sent to an engine once more.",
            registry=self.registry,
        )
        self.encode_s = Histogram(
            "epd_front_encode_job_seconds",
            "Duration of encode jobs that succeeded.",
            ("instance",),
            buckets=_SECONDS,
            registry=self.registry,
        )


class _Engines(Collector):
    """Reads the state of the engines when the metrics are read."""

    def __init__(self, pool: EndpointPool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        labels = ("instance", "role")
        up = GaugeMetricFamily("epd_front_instance_up", "1 if it is up.", labels=labels)
        load = GaugeMetricFamily(
            "epd_front_instance_in_flight", "Requests or jobs in flight.", labels=labels
        )
        for each in self._pool.all:
            up.add_metric((each.name, each.role), float(each.healthy))
            load.add_metric((each.name, each.role), float(each.load))
        return (up, load)
