"""Names of llm-d's proposal for what the router counts: read from its own metrics, counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class _Named:
    """One metric of the proposal, and where it is read.

    Attributes:
        source: Our metric.
        documentation: What is shown of it.
        kind: Its type; the source's unless given.
        label: Label that is kept of the source's; the values of others are added up. Empty for
            none.
        shown: Under which name `label` is kept.
        values: Values of `label` in the proposal's words, by ours; others are left out. Empty keeps
            all as they are.
        only: Label and value of the samples that are taken.
    """

    source: str
    documentation: str
    kind: str = ""
    label: str = ""
    shown: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, str] | None = None

    def labels(self, labels: Mapping[str, str]) -> dict[str, str] | None:
        """Return the labels of a sample; ``None`` if it is not taken."""
        if self.only is not None and labels.get(self.only[0]) != self.only[1]:
            return None
        kept = {"le": labels["le"]} if "le" in labels else {}
        if not self.label:
            return kept
        value = labels[self.label]
        if self.values and value not in self.values:
            return None
        return {**kept, self.shown: self.values.get(value, value)}


_LOCAL = ("local", "local_first")
_REMOTE = ("encoded", "retried")

NAMES: Mapping[str, _Named] = {
    "llmd_encode_requests": _Named(
        source="epd_router_encode_jobs", documentation="Encode jobs; of one item each."
    ),
    "llmd_encode_duration_seconds": _Named(
        source="epd_router_encode_job_seconds",
        documentation="Duration of encode jobs that succeeded.",
    ),
    "llmd_encode_queue_depth": _Named(
        source="epd_router_instance_in_flight",
        documentation="Encode jobs in flight.",
        only=("role", "encode"),
    ),
    "llmd_encode_parallel_workers": _Named(
        source="epd_router_encoders_per_request",
        documentation="Encode instances asked for the items of one request.",
    ),
    "llmd_encode_images_per_request": _Named(
        source="epd_router_items_per_request",
        documentation="Images of requests that have any.",
        only=("modality", "image"),
    ),
    "llmd_epd_requests": _Named(
        source="epd_router_stage_requests",
        documentation="Tries at instances, by stage.",
        label="stage",
        shown="stage",
        values={"encode": "encode", "prefill": "prefill", "answer": "decode"},
    ),
    # It ends in no _total there, so it is none of Prometheus's counters.
    "llmd_epd_stage_selection": _Named(
        source="epd_router_items",
        documentation="Items by where they were encoded.",
        kind="unknown",
        label="outcome",
        shown="decision",
        values={**dict.fromkeys(_LOCAL, "local"), **dict.fromkeys(_REMOTE, "remote")},
    ),
    "llmd_encode_failures": _Named(
        source="epd_router_encode_jobs",
        documentation="Encode jobs that failed; retry: the encoder was full, and is asked again.",
        label="end",
        shown="reason",
        values={
            "timeout": "timeout",
            "lost": "error",
            "error": "error",
            "refused": "error",
            "full": "retry",
        },
    ),
}
"""The proposal's metrics; counters without ``_total``."""


class LlmdNames(Collector):
    """Shows what another collector has, and some of it again under the proposal's names."""

    def __init__(self, counted: Collector) -> None:
        self._counted = counted

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics, see `Collector`."""
        found: dict[str, Metric] = {}
        for metric in self._counted.collect():
            found[metric.name] = metric
            yield metric
        for name, named in NAMES.items():
            if named.source in found:
                yield _renamed(name, named, found[named.source])


def _renamed(name: str, named: _Named, metric: Metric) -> Metric:
    kind = named.kind or metric.type
    renamed = Metric(name, named.documentation, kind)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample, labels in _taken(named, metric):
        ending = sample.name.removeprefix(metric.name) if kind == metric.type else ""
        key = f"{name}{ending}", tuple(labels.items())
        sums[key] = sums.get(key, 0.0) + sample.value
    for (sample_name, shown), value in sums.items():
        renamed.samples.append(Sample(sample_name, dict(shown), value))
    return renamed


def _taken(named: _Named, metric: Metric) -> Iterator[tuple[Sample, dict[str, str]]]:
    for sample in metric.samples:
        if sample.name.endswith("_created"):
            continue
        labels = named.labels(sample.labels)
        if labels is not None:
            yield sample, labels
