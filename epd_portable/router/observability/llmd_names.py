"""Names of llm-d's proposal for what the router counts: read from its own metrics, counted once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


class _Label(NamedTuple):
    """The label that is kept of a metric; the values of others are added up.

    Attributes:
        name: Its name in the proposal.
        values: Its values in the proposal's words, by ours; others are left out.
    """

    source: str
    name: str
    values: Mapping[str, str]


class _Named(NamedTuple):
    """One metric of the proposal.

    Attributes:
        documentation: What is shown of it.
        label: That is kept, if one is.
        only: Label and value of the samples that are taken.
        kind: Its type; the source's unless given.
    """

    source: str
    documentation: str
    label: _Label | None = None
    only: tuple[str, str] | None = None
    kind: str = ""

    def labels(self, labels: Mapping[str, str]) -> dict[str, str] | None:
        """Return the labels of a sample; ``None`` if it is not taken."""
        if self.only is not None and labels.get(self.only[0]) != self.only[1]:
            return None
        kept = {"le": labels["le"]} if "le" in labels else {}
        if self.label is None:
            return kept
        value = self.label.values.get(labels[self.label.source])
        return None if value is None else {**kept, self.label.name: value}


_STAGES = _Label("stage", "stage", {"encode": "encode", "prefill": "prefill", "answer": "decode"})
_DECISION = _Label(
    "outcome",
    "decision",
    {
        **dict.fromkeys(("local", "local_first"), "local"),
        **dict.fromkeys(("encoded", "retried"), "remote"),
    },
)
_REASON = _Label(
    "end",
    "reason",
    {"timeout": "timeout", "full": "retry", **dict.fromkeys(("lost", "error", "refused"), "error")},
)

NAMES: Mapping[str, _Named] = {
    "llmd_encode_requests": _Named("epd_router_encode_jobs", "Encode jobs; of one item each."),
    "llmd_encode_duration_seconds": _Named(
        "epd_router_encode_job_seconds", "Duration of encode jobs that succeeded."
    ),
    "llmd_encode_queue_depth": _Named(
        "epd_router_instance_in_flight", "Encode jobs in flight.", only=("role", "encode")
    ),
    "llmd_encode_parallel_workers": _Named(
        "epd_router_encoders_per_request", "Encode instances asked for the items of one request."
    ),
    "llmd_encode_images_per_request": _Named(
        "epd_router_items_per_request",
        "Images of requests that have any.",
        only=("modality", "image"),
    ),
    "llmd_epd_requests": _Named(
        "epd_router_stage_requests", "Tries at instances, by stage.", _STAGES
    ),
    # It ends in no _total there, so it is none of Prometheus's counters.
    "llmd_epd_stage_selection": _Named(
        "epd_router_items", "Items by where they were encoded.", _DECISION, kind="unknown"
    ),
    "llmd_encode_failures": _Named(
        "epd_router_encode_jobs",
        "Encode jobs that failed; retry: the encoder was full, and is asked again.",
        _REASON,
    ),
}
"""The proposal's metrics; counters without ``_total``."""


class LlmdNames(Collector):
    """Shows what another collector has, and some of it again under the proposal's names."""

    def __init__(self, counted: Collector) -> None:
        self._counted = counted

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics, see `Collector`."""
        found = {metric.name: metric for metric in self._counted.collect()}
        yield from found.values()
        for name, named in NAMES.items():
            if named.source in found:
                yield _renamed(name, named, found[named.source])


def _renamed(name: str, named: _Named, metric: Metric) -> Metric:
    kind = named.kind or metric.type
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in metric.samples:
        labels = named.labels(sample.labels)
        if labels is not None and not sample.name.endswith("_created"):
            ending = sample.name.removeprefix(metric.name) if kind == metric.type else ""
            key = f"{name}{ending}", tuple(labels.items())
            sums[key] = sums.get(key, 0.0) + sample.value
    renamed = Metric(name, named.documentation, kind)
    renamed.samples = [Sample(each, dict(labels), sum) for (each, labels), sum in sums.items()]
    return renamed
