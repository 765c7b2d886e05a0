"""What the router counts, in Prometheus form; one registry per router."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from epd_portable.router.instances import Instance

ItemFate = Literal[
    "encoded", "other_encoder", "local", "sooner_here", "no_encoder", "not_needed", "cancelled"
]
"""``encoded``: by the encoder asked first. ``other_encoder``: by a second one. ``local``: encoders
failed and the PD instance was told to encode. ``sooner_here``: it encodes by choice, see
`epd_portable.router.elastic`. ``no_encoder``: none was healthy from the start.
``not_needed``: its job failed when the answer had already begun. ``cancelled``: the request ended
first."""

Rung = Literal[
    "encoder_full",
    "other_encoder",
    "original_media",
    "local_encode",
    "pd_again",
    "broken_off",
    "passed_on",
    "refused",
    "unavailable",
    "timeout",
]
"""What is done when something has gone wrong, see `epd_portable.router.ladder.LADDER`."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class _InstanceCollector(Collector):
    """Reads the state of the instances when the metrics are read."""

    def __init__(self, instances: Callable[[], Iterable[Instance]]) -> None:
        self._instances = instances

    def collect(self) -> Iterable[Metric]:
        labels = ("instance", "role")
        up = GaugeMetricFamily("epd_router_instance_up", "1 if healthy.", labels=labels)
        load = GaugeMetricFamily(
            "epd_router_instance_in_flight", "Requests or jobs in flight.", labels=labels
        )
        for instance in self._instances():
            where = (instance.name, instance.role)
            up.add_metric(where, float(instance.healthy))
            load.add_metric(where, float(instance.load))
        return (up, load)


class _TogetherCollector(Collector):
    """Reads what all processes of a router have counted, of the instances that are there."""

    def __init__(self, folder: str, instances: Callable[[], Iterable[Instance]]) -> None:
        self._counted = MultiProcessCollector(None, folder)  # type: ignore[no-untyped-call]
        self._instances = instances

    def collect(self) -> Iterable[Metric]:
        names = {None, *(instance.name for instance in self._instances())}
        for metric in self._counted.collect():  # type: ignore[no-untyped-call]
            metric.samples = [
                each for each in metric.samples if each.labels.get("instance") in names
            ]
            yield metric


class Metrics:
    """Counters and histograms of one router.

    Label values come from the settings, from registrations and from the literals above, never from
    clients.

    Args:
        instances: Returns those that there are.
        folder: Where the processes of a router count together; such a process must have been
            started with it as ``PROMETHEUS_MULTIPROC_DIR``. Empty if there is one process.
    """

    def __init__(
        self, instances: Callable[[], Iterable[Instance]] = tuple, folder: str = ""
    ) -> None:
        registry = CollectorRegistry()
        self._shown = CollectorRegistry() if folder else registry
        self._shown.register(_InstanceCollector(instances))
        if folder:
            self._shown.register(_TogetherCollector(folder, instances))
        self._together = bool(folder)
        # To find a metric by its labels costs as much as to count.
        self._of_answers = functools.cache(self._find_those_of_answers)
        self.requests = Counter(
            "epd_router_requests", "Answered requests.", ("endpoint", "status"), registry=registry
        )
        self.in_flight = Gauge(
            "epd_router_requests_in_flight",
            "Requests being answered.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.disconnects = Counter(
            "epd_router_client_disconnects",
            "Requests given up by their client.",
            ("endpoint",),
            registry=registry,
        )
        self.items = Counter(
            "epd_router_items", "Media items by what became of them.", ("fate",), registry=registry
        )
        self.modalities = Counter(
            "epd_router_items_by_modality",
            "Media items of requests; one that a request repeats counts once.",
            ("modality",),
            registry=registry,
        )
        self.ladder = Counter(
            "epd_router_ladder", "Steps down the failure ladder.", ("rung",), registry=registry
        )
        self.sources = Counter(
            "epd_router_item_sources",
            "How PD instances say they had their items (answers that are not streamed).",
            ("source", "path"),
            registry=registry,
        )
        self.elastic = Counter(
            "epd_router_elastic_items",
            "Items that PD instances encode by choice, by reason.",
            ("reason",),
            registry=registry,
        )
        self.encode_s = Histogram(
            "epd_router_encode_job_seconds",
            "Duration of encode jobs that succeeded.",
            ("instance",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_byte_s = Histogram(
            "epd_router_first_byte_seconds",
            "From a request's last byte to the first byte of its answer.",
            ("endpoint",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.response_s = Histogram(
            "epd_router_response_seconds",
            "From a request's last byte to the last byte of its answer.",
            ("endpoint",),
            buckets=_SECONDS,
            registry=registry,
        )

    def answered(
        self, endpoint: str, status: int, started: float, first_at: float, *, gone: bool
    ) -> None:
        """Count a request that has ended.

        Args:
            endpoint: Its path, one of those that are served.
            status: Of the answer, 0 if there was none.
            started: When its body was there; by `time.monotonic`.
            first_at: When the answer began, 0 if it did not.
            gone: The client gave it up.
        """
        if gone:
            self.disconnects.labels(endpoint).inc()
            return
        first_byte_s, response_s, requests = self._of_answers(endpoint, status)
        if first_at:
            first_byte_s.observe(first_at - started)
        response_s.observe(time.monotonic() - started)
        requests.inc()

    def _find_those_of_answers(
        self, endpoint: str, status: int
    ) -> tuple[Histogram, Histogram, Counter]:
        return (
            self.first_byte_s.labels(endpoint),
            self.response_s.labels(endpoint),
            self.requests.labels(endpoint, str(status)),
        )

    def item(self, fate: ItemFate) -> None:
        """Count one item."""
        self.items.labels(fate).inc()

    def rung(self, rung: Rung) -> None:
        """Count one step down the failure ladder."""
        self.ladder.labels(rung).inc()

    def forget(self, instance: str) -> None:
        """Drop what was counted of an instance that has left."""
        if self._together:
            return  # It is left out when all counts are read.
        with contextlib.suppress(KeyError):  # Older clients raise it for what was never counted.
            self.encode_s.remove(instance)

    def exposition(self) -> bytes:
        """Return everything in Prometheus text format."""
        return generate_latest(self._shown)
