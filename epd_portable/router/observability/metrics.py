"""What the router counts, in Prometheus form; one registry per router."""

from __future__ import annotations

import collections
import contextlib
import functools

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from epd_portable.connector.stores.metrics import StoreMetrics
from epd_portable.placement.admission import AdmissionMetrics
from epd_portable.placement.instances import EndpointPool
from epd_portable.placement.metrics import InstanceCollector, stats_of
from epd_portable.router.observability.llmd_names import LlmdNames
from epd_portable.router.observability.record import ItemRecord, Leg, Listener, RequestRecord, Step
from epd_portable.wire.params import PrefillOutcome

_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics(Listener):
    """Counters and histograms of one router; counts what it hears of requests.

    Label values come from the settings, from registrations and from the literals above, never from
    clients.

    Args:
        llmd_names: Show some of it a second time, under names of llm-d's proposal.
    """

    def __init__(self, instances: EndpointPool, *, llmd_names: bool = False) -> None:
        registry = CollectorRegistry()
        registry.register(InstanceCollector(lambda: stats_of(instances), "epd_router"))
        self._shown: Collector = LlmdNames(registry) if llmd_names else registry
        counter = functools.partial(Counter, registry=registry)
        gauge = functools.partial(Gauge, registry=registry)
        seconds = functools.partial(Histogram, registry=registry, buckets=_SECONDS)
        counts = functools.partial(Histogram, registry=registry, buckets=_COUNTS)

        # Requests.
        self.requests = counter("epd_router_requests", "Answered.", ("endpoint", "status"))
        self.in_flight = gauge("epd_router_requests_in_flight", "Requests being answered.")
        self.disconnects = counter(
            "epd_router_client_disconnects", "Requests given up by their client.", ("endpoint",)
        )
        self.request_bytes = counter("epd_router_request_bytes", "Bytes of request bodies.")
        self.answer_bytes = counter("epd_router_answer_bytes", "Bytes of answers' bodies.")
        self.fallbacks = counter(
            "epd_router_fallbacks",
            "Failures, by when they happened, why, and what was done then.",
            ("phase", "failure", "fallback"),
        )
        self.stages = counter(
            "epd_router_stage_requests", "Tries at instances; encode jobs: of one item.", ("stage",)
        )
        self.prefill_tokens = counter(
            "epd_router_prefill_tokens", "Of prompts, less those in prefix caches; estimated."
        )
        self.output_tokens = counter(
            "epd_router_output_tokens", "Of answers that have ended, as far as they say."
        )
        self.prefills = counter(
            "epd_router_prefills", "Prompts of decode instances, by place.", ("where",)
        )

        # Items.
        self.items = counter("epd_router_items", "Items by what became of them.", ("outcome",))
        self.sources = counter(
            "epd_router_item_sources",
            "How PD instances say they had their items (answers that are not streamed).",
            ("source", "path"),
        )
        self.elastic = counter(
            "epd_router_elastic_items", "Items that PD instances encode by choice.", ("reason",)
        )
        self.store = StoreMetrics("router", registry)
        self.items_per_request = counts(
            "epd_router_items_per_request", "Of one modality, if there are any.", ("modality",)
        )
        self.encoders_per_request = counts(
            "epd_router_encoders_per_request",
            "Encode instances asked for the items of one request, of requests that ask any.",
        )
        self.encode_jobs = counter(
            "epd_router_encode_jobs", "Encode jobs by how they ended.", ("end",)
        )
        self.encode_bytes = counter(
            "epd_router_encode_job_bytes", "Bytes of the bodies of encode jobs."
        )
        self.encode_s = seconds(
            "epd_router_encode_job_seconds", "Of encode jobs that succeeded.", ("instance",)
        )
        self.prefill_s = seconds(
            "epd_router_prefill_seconds",
            "Duration of prompts computed by another instance, their items awaited.",
        )

        # Times of answers: from a request's last byte.
        self.response_s = seconds(
            "epd_router_response_seconds", "To the last byte of its answer.", ("endpoint",)
        )
        self.first_token_s = seconds(
            "epd_router_first_token_seconds",
            "To the first byte of a streamed answer.",
            ("topology",),
        )
        self.token_s = Histogram(
            "epd_router_time_per_token_seconds",
            "From the first byte of a streamed answer to its last, by tokens after the first. "
            "Tokens are those of usage where the stream has it, else its events less two, "
            "which is too few where an event brings several.",
            ("topology",),
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )

        # Media by URL.
        self.media_urls = counter(
            "epd_router_media_urls", "Media named by URL, by where they come from.", ("source",)
        )
        self.fetches = counter("epd_router_media_fetches", "Fetches, by result.", ("result",))
        self.fetched_bytes = counter("epd_router_media_fetched_bytes", "Bytes of fetched media.")
        self.fetch_s = seconds("epd_router_media_fetch_seconds", "Of fetches that succeeded.")

        # Admission.
        self.admission = AdmissionMetrics(registry, "epd_router")

        # To find a metric by its labels costs as much as to count.
        self._of_answers = functools.cache(
            lambda endpoint, status: (
                self.response_s.labels(endpoint),
                self.requests.labels(endpoint, str(status)),
            )
        )
        self._of_streams = functools.cache(
            lambda topology: (self.first_token_s.labels(topology), self.token_s.labels(topology))
        )
        self._answers = self.stages.labels("answer")

    # What it hears.

    def begun(self, record: RequestRecord) -> None:
        """See `Listener`, as for the next ones."""
        self.in_flight.inc()

    def job_ended(self, record: RequestRecord, job: Leg, item: ItemRecord) -> None:
        """Count an encode job."""
        self.stages.labels("encode").inc()
        self.encode_jobs.labels(job.end).inc()
        self.encode_bytes.inc(item.nbytes)
        if job.end == "encoded":
            self.encode_s.labels(job.instance).observe(job.ended_at - job.began_at)

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
        self.output_tokens.inc(record.tokens)
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
        response_s, requests = self._of_answers(record.endpoint, record.status)
        # Of one that is refused before its body was read, the time since its headers.
        started = record.read_at or record.began_at
        response_s.observe(record.ended_at - started)
        requests.inc()
        if record.events and record.status < 400:
            first_token_s, token_s = self._of_streams(record.topology)
            first_token_s.observe(record.first_at - started)
            if (tokens := record.tokens) > 1:
                token_s.observe((record.ended_at - record.first_at) / (tokens - 1))

    def _count_items(self, record: RequestRecord) -> None:
        for modality, count in collections.Counter(each.modality for each in record.items).items():
            self.items_per_request.labels(modality).observe(count)
        if encoders := {job.instance for item in record.items for job in item.jobs}:
            self.encoders_per_request.observe(len(encoders))

    def had(self, outcome: PrefillOutcome) -> None:
        """Count how an instance says that it had its items."""
        for item in outcome.items:
            self.sources.labels(item.source, item.path).inc()

    def forget(self, instance: str) -> None:
        """Drop what was counted of an instance that has left."""
        with contextlib.suppress(KeyError):  # Older clients raise it for what was never counted.
            self.encode_s.remove(instance)

    def exposition(self) -> bytes:
        """Return everything in Prometheus text format."""
        return generate_latest(self._shown)
