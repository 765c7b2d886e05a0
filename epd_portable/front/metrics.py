"""What the front counts beyond vLLM's own metrics of each engine."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from epd_portable.placement.admission import AdmissionMetrics
from epd_portable.placement.instances import EndpointPool
from epd_portable.placement.metrics import InstanceCollector, stats_of

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class FrontMetrics:
    """Counters of one front, and the state of its engines.

    Attributes:
        requests: By status of the response; 0 for a client that disconnected before it.
        items: By `ItemResult`.
        jobs: By encode engine and end: ``encoded``, or the value of a `FailureKind`.
        prefills: By place. ``disaggregated``: a prefill engine. The decode engine itself:
            ``unsuited``, it needs more of the prompt than its KV; ``unavailable``, no prefill
            engine is up; ``local``, prefill jobs have failed.
    """

    def __init__(self, pool: EndpointPool) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(InstanceCollector(lambda: stats_of(pool), "epd_front"))
        self.admission = AdmissionMetrics(self.registry, "epd_front")
        self.requests = Counter(
            "epd_front_requests",
            "HTTP requests, by status of the response.",
            ("status",),
            registry=self.registry,
        )
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
        self.prefills = Counter(
            "epd_front_prefills",
            "Requests to decode engines, by where their prompts are computed.",
            ("where",),
            registry=self.registry,
        )
        self.jobs = Counter(
            "epd_front_encode_jobs",
            "Encode jobs that have ended, by end.",
            ("instance", "end"),
            registry=self.registry,
        )
        self.encode_s = Histogram(
            "epd_front_encode_job_seconds",
            "Duration of encode jobs that succeeded.",
            ("instance",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.fetches = Counter(
            "epd_front_media_fetches",
            "Media named by URL, by what became of the fetch.",
            ("result",),
            registry=self.registry,
        )
        self.fetched_bytes = Counter(
            "epd_front_media_fetched_bytes", "Bytes of fetched media.", registry=self.registry
        )
        self.fetch_s = Histogram(
            "epd_front_media_fetch_seconds",
            "Duration of fetches that succeeded.",
            buckets=_SECONDS,
            registry=self.registry,
        )
