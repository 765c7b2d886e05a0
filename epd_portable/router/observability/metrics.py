"""What the router counts, in Prometheus form; one registry per router."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epd_portable.connector.stores.metrics import StoreMetrics
from epd_portable.delivery.instances import Instance
from epd_portable.router.observability.activity import Activity
from epd_portable.router.observability.llmd_names import LlmdNames
from epd_portable.router.observability.record import (
    ItemRecord,
    JobRecord,
    Listener,
    RequestRecord,
    Step,
    Topology,
)
from epd_portable.wire.params import PrefillOutcome

_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
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


class Metrics(Listener):
    """Counters and histograms of one router; counts what it hears of requests.

    Label values come from the settings, from registrations and from the literals above, never from
    clients.

    Args:
        instances: Returns those that there are.
        llmd_names: Show some of it a second time, under names of llm-d's proposal.

    Attributes:
        activity: What the status page shows.
    """

    def __init__(
        self,
        instances: Callable[[], Iterable[Instance]] = tuple,
        *,
        llmd_names: bool = False,
    ) -> None:
        registry = CollectorRegistry()
        registry.register(_InstanceCollector(instances))
        self._shown: Collector = LlmdNames(registry) if llmd_names else registry
        self.activity = Activity()
        # To find a metric by its labels costs as much as to count.
        self._of_answers = functools.cache(self._find_those_of_answers)
        self._of_streams = functools.cache(self._find_those_of_streams)
        self.requests = Counter(
            "epd_router_requests", "Answered requests.", ("endpoint", "status"), registry=registry
        )
        self.in_flight = Gauge(
            "epd_router_requests_in_flight",
            "Requests being answered.",
            registry=registry,
        )
        self.disconnects = Counter(
            "epd_router_client_disconnects",
            "Requests given up by their client.",
            ("endpoint",),
            registry=registry,
        )
        self.items = Counter(
            "epd_router_items",
            "Media items by what became of them.",
            ("outcome",),
            registry=registry,
        )
        self.modalities = Counter(
            "epd_router_items_by_modality",
            "Media items of requests; one that a request repeats counts once.",
            ("modality",),
            registry=registry,
        )
        self.fallbacks = Counter(
            "epd_router_fallbacks",
            "Failures, by when they happened, why, and what was done then.",
            ("phase", "failure", "fallback"),
            registry=registry,
        )
        self.sources = Counter(
            "epd_router_item_sources",
            "How PD instances say they had their items (answers that are not streamed).",
            ("source", "path"),
            registry=registry,
        )
        self.store = StoreMetrics("router", registry)
        self.elastic = Counter(
            "epd_router_elastic_items",
            "Items that PD instances encode by choice, by reason.",
            ("reason",),
            registry=registry,
        )
        self.prefills = Counter(
            "epd_router_prefills",
            "Requests to decode instances, by where their prompts are computed.",
            ("where",),
            registry=registry,
        )
        self.encode_s = Histogram(
            "epd_router_encode_job_seconds",
            "Duration of encode jobs that succeeded.",
            ("instance",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.stages = Counter(
            "epd_router_stage_requests",
            "Tries at instances, by what they were asked for; encode jobs are of one item.",
            ("stage",),
            registry=registry,
        )
        self._answers = self.stages.labels("answer")
        self.encode_jobs = Counter(
            "epd_router_encode_jobs",
            "Encode jobs by how they ended.",
            ("end",),
            registry=registry,
        )
        self.encode_bytes = Counter(
            "epd_router_encode_job_bytes", "Bytes of the bodies of encode jobs.", registry=registry
        )
        self.items_per_request = Histogram(
            "epd_router_items_per_request",
            "Items of one modality in requests that have any.",
            ("modality",),
            buckets=_COUNTS,
            registry=registry,
        )
        self.encoders_per_request = Histogram(
            "epd_router_encoders_per_request",
            "Encode instances asked for the items of one request, of requests that ask any.",
            buckets=_COUNTS,
            registry=registry,
        )
        self.prefill_s = Histogram(
            "epd_router_prefill_seconds",
            "Duration of prompts computed by another instance, their items awaited.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.request_bytes = Counter(
            "epd_router_request_bytes", "Bytes of request bodies.", registry=registry
        )
        self.answer_bytes = Counter(
            "epd_router_answer_bytes",
            "Bytes of answers' bodies; not of those that Envoy carries.",
            registry=registry,
        )
        self.first_token_s = Histogram(
            "epd_router_first_token_seconds",
            "From a request's last byte to the first byte of a streamed answer, by who did what.",
            ("topology",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.token_s = Histogram(
            "epd_router_time_per_token_seconds",
            "From the first byte of a streamed answer to its last, by tokens after the first. "
            "Tokens are those of usage where the stream tells it, else its events less two, "
            "which is too few where an event brings several.",
            ("topology",),
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self.media_urls = Counter(
            "epd_router_media_urls",
            "Media that requests name by URL, by where they come from.",
            ("source",),
            registry=registry,
        )
        self.fetches = Counter(
            "epd_router_media_fetches",
            "How fetching of media, or refusing to, has ended.",
            ("result",),
            registry=registry,
        )
        self.fetched_bytes = Counter(
            "epd_router_media_fetched_bytes", "Bytes of media that were fetched.", registry=registry
        )
        self.fetch_s = Histogram(
            "epd_router_media_fetch_seconds",
            "Duration of fetches that succeeded.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.admission_waiting = Gauge(
            "epd_router_admission_waiting",
            "Requests that wait to be let in.",
            ("priority",),
            registry=registry,
        )
        self.admission_wait_s = Histogram(
            "epd_router_admission_wait_seconds",
            "How long requests waited that were not let in at once.",
            ("priority",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.admission_refused = Counter(
            "epd_router_admission_refused",
            "Requests answered 429, by reason and by the limit that was reached.",
            ("reason", "limit"),
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

    # What it hears.

    def begun(self, record: RequestRecord) -> None:
        """See `Listener`, as for the next ones."""
        self.in_flight.inc()

    def job_ended(self, record: RequestRecord, item: ItemRecord, job: JobRecord) -> None:
        """Count an encode job."""
        self.stages.labels("encode").inc()
        self.encode_jobs.labels(job.end).inc()
        self.encode_bytes.inc(item.nbytes)
        if job.end == "encoded":
            self.encode_s.labels(job.encoder).observe(job.ended_at - job.began_at)

    def item_ended(self, record: RequestRecord, item: ItemRecord) -> None:
        """Count an item by what became of it."""
        self.items.labels(item.end).inc()

    def stepped(self, record: RequestRecord, step: Step) -> None:
        """Count a fallback."""
        self.fallbacks.labels(step.phase, step.failure, step.fallback).inc()

    def ended(self, record: RequestRecord) -> None:
        """Count a request."""
        self.in_flight.dec()
        self.request_bytes.inc(record.nbytes)
        self.answer_bytes.inc(record.nbytes_out)
        for leg in record.legs:
            if leg.stage == "answer":
                self._answers.inc()
                continue
            self.stages.labels("prefill").inc()
            if not leg.failed:
                self.prefill_s.observe(leg.ended_at - leg.began_at)
        if record.items:
            self._count_items(record)
        if record.gone:
            self.disconnects.labels(record.endpoint).inc()
            return
        first_byte_s, response_s, requests = self._of_answers(record.endpoint, record.status)
        # Of one that is refused before its body was read, the time since its headers.
        started = record.read_at or record.began_at
        if record.first_at:
            first_byte_s.observe(record.first_at - started)
        response_s.observe(record.ended_at - started)
        requests.inc()
        if record.events and record.status < 400:
            first_token_s, token_s = self._of_streams(record.topology)
            first_token_s.observe(record.first_at - started)
            if (tokens := record.tokens) > 1:
                token_s.observe((record.ended_at - record.first_at) / (tokens - 1))

    def _count_items(self, record: RequestRecord) -> None:
        for modality, count in collections.Counter(each.modality for each in record.items).items():
            self.modalities.labels(modality).inc(count)
            self.items_per_request.labels(modality).observe(count)
        if encoders := {job.encoder for item in record.items for job in item.jobs}:
            self.encoders_per_request.observe(len(encoders))

    def _find_those_of_streams(self, topology: Topology) -> tuple[Histogram, Histogram]:
        return self.first_token_s.labels(topology), self.token_s.labels(topology)

    def _find_those_of_answers(
        self, endpoint: str, status: int
    ) -> tuple[Histogram, Histogram, Counter]:
        return (
            self.first_byte_s.labels(endpoint),
            self.response_s.labels(endpoint),
            self.requests.labels(endpoint, str(status)),
        )

    def had(self, outcome: PrefillOutcome) -> None:
        """Count how an instance says that it had its items."""
        for item in outcome.items:
            self.sources.labels(item.source, item.path).inc()
            self.activity.had(outcome.instance, item)

    def forget(self, instance: str) -> None:
        """Drop what was counted of an instance that has left."""
        self.activity.forget(instance)
        with contextlib.suppress(KeyError):  # Older clients raise it for what was never counted.
            self.encode_s.remove(instance)

    def exposition(self) -> bytes:
        """Return everything in Prometheus text format."""
        return generate_latest(self._shown)
