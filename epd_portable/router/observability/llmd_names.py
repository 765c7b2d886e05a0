"""Names of llm-d's proposal for what the router counts: read from its own metrics, counted once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


class _Named(NamedTuple):
    """One metric of the proposal.

    Attributes:
        label: Of the source, which is looked at; values of its other labels are added up.
        values: Those of the label's values that count, in the proposal's words.
        name: Of the label in the proposal, if it has it.
        kind: Its type; the source's unless given.
    """

    source: str
    documentation: str
    label: str = ""
    values: Mapping[str, str] = {}
    name: str = ""
    kind: str = ""

    def labels(self, labels: Mapping[str, str]) -> dict[str, str] | None:
        """Return the labels of a sample; ``None`` if it does not count."""
        kept = {"le": labels["le"]} if "le" in labels else {}
        if not self.label:
            return kept
        value = self.values.get(labels[self.label])
        if value is None:
            return None
        return {**kept, self.name: value} if self.name else kept


_STAGES = {"encode": "encode", "prefill": "prefill", "answer": "decode"}
_DECISIONS = {
    **dict.fromkeys(("local", "local_first"), "local"),
    **dict.fromkeys(("encoded", "retried"), "remote"),
}
_REASONS = {
    **{"timeout": "timeout", "full": "retry"},
    **dict.fromkeys(("lost", "error", "refused"), "error"),
}

NAMES: Mapping[str, _Named] = {
    "llmd_encode_requests": _Named("epd_router_encode_jobs", "Encode jobs; of one item each."),
    "llmd_encode_duration_seconds": _Named(
        "epd_router_encode_job_seconds", "Duration of encode jobs that succeeded."
    ),
    "llmd_encode_queue_depth": _Named(
        "epd_router_instance_in_flight", "Encode jobs in flight.", "role", {"encode": ""}
    ),
    "llmd_encode_parallel_workers": _Named(
        "epd_router_encoders_per_request", "Encode instances asked for the items of one request."
    ),
    "llmd_encode_images_per_request": _Named(
        "epd_router_items_per_request", "Images, if there are any.", "modality", {"image": ""}
    ),
    "llmd_epd_requests": _Named(
        "epd_router_stage_requests", "Tries at instances, by stage.", "stage", _STAGES, "stage"
    ),
    # It ends in no _total there, so it is none of Prometheus's counters.
    "llmd_epd_stage_selection": _Named(
        "epd_router_items",
        "Where items were encoded.",
        "outcome",
        _DECISIONS,
        "decision",
        "unknown",
    ),
    "llmd_encode_failures": _Named(
        "epd_router_encode_jobs",
        "Encode jobs that failed; retry: the encoder was full, and is asked again.",
        *("end", _REASONS, "reason"),
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
