"""What every front shows of its instances in Prometheus' format."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epd_portable.delivery.instances import EndpointPool


class InstanceCollector(Collector):
    """Reads the state of the instances, and what work there is, when the metrics are read.

    Args:
        front: Beginning of the metrics' names.
    """

    def __init__(self, pool: EndpointPool, front: str) -> None:
        self._pool = pool
        self._front = front

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        gauge, front, each_one = GaugeMetricFamily, self._front, ("instance", "role")
        up = gauge(f"{front}_instance_up", "1 if healthy.", labels=each_one)
        load = gauge(f"{front}_instance_in_flight", "Requests or jobs in flight.", labels=each_one)
        parked = gauge(
            f"{front}_instance_parked",
            "1 if the other instance on its device gets new work.",
            labels=each_one,
        )
        owed = gauge(
            f"{front}_owed_seconds", "Work given and not done, of one instance.", labels=["role"]
        )
        came = CounterMetricFamily(
            f"{front}_work_seconds",
            "Work that came, of one instance of a role, by kind.",
            labels=["role", "modality", "size"],
        )
        by_role: dict[str, float] = {}
        for each in self._pool.all:
            where = (each.name, each.role)
            up.add_metric(where, float(each.healthy))
            load.add_metric(where, float(each.load))
            parked.add_metric(where, float(each.parked))
            by_role[each.role] = by_role.get(each.role, 0.0) + each.owed_s
        for role, owed_s in by_role.items():
            owed.add_metric([role], owed_s)
        for (role, modality, size), seconds in self._pool.work.came_s.items():
            came.add_metric([role, modality, str(1 << size)], seconds)
        return (up, load, parked, owed, came)
