"""Metrics of the front beyond vLLM's own of each engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epd_portable.instruments import SECONDS, Instruments
from epd_portable.placement.admission import AdmissionMetrics
from epd_portable.placement.instances import EndpointPool, Seen

_SECONDS = SECONDS[3:-1]


class InstanceCollector(Collector):
    """Reads the state of the instances, and what work there is, when the metrics are read."""

    def __init__(self, read: Callable[[], Seen]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        gauge, each_one = GaugeMetricFamily, ("instance", "role")
        up = gauge("epd_front_instance_up", "1 while an engine is up.", labels=each_one)
        load = gauge(
            "epd_front_instance_in_flight",
            "Requests or jobs in flight at an engine.",
            labels=each_one,
        )
        backlog = gauge(
            "epd_front_backlog_seconds",
            "Work given to engines of a role and not ended, in seconds of one engine.",
            labels=["role"],
        )
        differs = gauge(
            "epd_front_output_difference",
            "Largest relative difference of an engine's encoder outputs from the right ones.",
            labels=each_one,
        )
        came = CounterMetricFamily(
            "epd_front_work_seconds",
            "Work that came, in seconds of one engine.",
            labels=["role", "modality", "size"],
        )
        by_role: dict[str, float] = {}
        seen = self._read()
        for each in seen.instances:
            where = (each["name"], each["role"])
            up.add_metric(where, float(each["healthy"]))
            load.add_metric(where, float(each["in_flight"]))
            if (difference := each["output_difference"]) is not None:
                differs.add_metric(where, difference)
            by_role[each["role"]] = by_role.get(each["role"], 0.0) + each["backlog_s"]
        for role, backlog_s in by_role.items():
            backlog.add_metric([role], backlog_s)
        for (role, modality, size), seconds in seen.came_s:
            came.add_metric([role, modality, str(1 << size)], seconds)
        return (up, load, backlog, differs, came)


class FrontMetrics(Instruments):
    """Counters of one front, and the state of its engines; values: `docs/observability.md`."""

    def __init__(self, pool: EndpointPool) -> None:
        super().__init__()
        self.registry.register(InstanceCollector(pool.seen))
        self.admission = AdmissionMetrics(self.registry)
        counter, seconds = self._counter, self._seconds
        self.requests = counter(
            "epd_front_requests",
            "HTTP requests by status; 0: the client disconnected before the response.",
            "status",
        )
        self.items = counter("epd_front_items", "Items by outcome.", "outcome")
        self.elastic = counter(
            "epd_front_elastic_items",
            "Items that generating engines encode by choice.",
            "reason",
        )
        self.retries = counter(
            "epd_front_retries",
            "Requests that were sent to an engine once more after a failure.",
        )
        self.prefills = counter(
            "epd_front_prefills",
            "Requests to decode engines by place of prefill.",
            "where",
        )
        self.jobs = counter(
            "epd_front_encode_jobs", "Encode jobs by engine and end.", "instance end"
        )
        self.encode_s = seconds(
            "epd_front_encode_job_seconds",
            "Duration of encode jobs that succeeded.",
            "instance",
            _SECONDS,
        )
        self.fetches = counter(
            "epd_front_media_fetches", "Media that requests name by URL, by result.", "result"
        )
