"""What every front shows of its instances in Prometheus' format."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epd_portable.config.roles import Role
from epd_portable.placement.instances import EndpointPool


class InstanceStats(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown of one instance, see `Instance`."""

    name: str
    role: Role
    healthy: bool
    parked: bool
    load: int
    owed_s: float


class PoolStats(msgspec.Struct, frozen=True):
    """What is shown of all instances.

    Attributes:
        came_s: Items of `Work.came_s`.
    """

    instances: list[InstanceStats]
    came_s: list[tuple[tuple[Role, str, int], float]]


def stats_of(pool: EndpointPool) -> PoolStats:
    """Return what a pool has at this moment."""
    instances = [
        InstanceStats(
            name=each.name,
            role=each.role,
            healthy=each.health.healthy,
            parked=each.health.parked,
            load=each.load,
            owed_s=each.backlog.owed_s,
        )
        for each in pool.all
    ]
    return PoolStats(instances, list(pool.work.came_s.items()))


class InstanceCollector(Collector):
    """Reads the state of the instances, and what work there is, when the metrics are read.

    Args:
        read: Returns them.
        front: Beginning of the metrics' names.
    """

    def __init__(self, read: Callable[[], PoolStats], front: str) -> None:
        self._read = read
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
        stats = self._read()
        for each in stats.instances:
            where = (each.name, each.role)
            up.add_metric(where, float(each.healthy))
            load.add_metric(where, float(each.load))
            parked.add_metric(where, float(each.parked))
            by_role[each.role] = by_role.get(each.role, 0.0) + each.owed_s
        for role, owed_s in by_role.items():
            owed.add_metric([role], owed_s)
        for (role, modality, size), seconds in stats.came_s:
            came.add_metric([role, modality, str(1 << size)], seconds)
        return (up, load, parked, owed, came)
