"""What every front shows of its instances in Prometheus' format."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epd_portable.delivery.instances import Instance


class InstanceCollector(Collector):
    """Reads the state of the instances when the metrics are read.

    Args:
        instances: Returns those that there are.
        up: Name of the gauge of their health.
        in_flight: Name of the gauge of their load.
    """

    def __init__(
        self, instances: Callable[[], Iterable[Instance]], *, up: str, in_flight: str
    ) -> None:
        self._instances = instances
        self._up = up
        self._in_flight = in_flight

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        labels = ("instance", "role")
        up = GaugeMetricFamily(self._up, "1 if healthy.", labels=labels)
        load = GaugeMetricFamily(self._in_flight, "Requests or jobs in flight.", labels=labels)
        for each in self._instances():
            where = (each.name, each.role)
            up.add_metric(where, float(each.healthy))
            load.add_metric(where, float(each.load))
        return (up, load)
