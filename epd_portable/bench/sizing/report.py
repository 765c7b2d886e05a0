"""Answers of `plan` as tables, charts and a summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epd_portable.bench.chart import Chart, Series
from epd_portable.bench.report import Plain, Report, Table, conditions
from epd_portable.bench.sizing.measure import Line, MeasuredStages
from epd_portable.bench.sizing.scaling import Growth, Study
from epd_portable.bench.sizing.search import Candidate, LatencyLimits, SizingQuestion, recommend
from epd_portable.bench.sizing.simulate import Deployment, Outcome

_MEASURED = ("epd_portable.bench.sizing.engine", "epd_portable.bench.sizing.simulate")
NOT_MODELLED = (
    "Not modelled: prefix and encoder caches (every picture is new), KV cache memory, the receive "
    "pool, faults, networks with contention, attention that grows with the context."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What one deployment would do at one rate.

    Attributes:
        deployment: The instances.
        asked: Requests a second.
        outcome: Of the simulation.
    """

    deployment: Deployment
    asked: float
    outcome: Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class SizingAnswer:
    """Everything that one call of `plan` found; what was not asked for is empty.

    Attributes:
        question: What was simulated.
        limits: Of latencies.
        measured: Stage times that were measured for it.
        candidates: Of the search.
        predictions: At rates that were asked for.
        study: Of sizes.
    """

    question: SizingQuestion
    limits: LatencyLimits
    measured: MeasuredStages | None
    candidates: tuple[Candidate, ...]
    predictions: tuple[Prediction, ...]
    study: Study | None


def make_report(answer: SizingAnswer, *, command: str, load_before: float) -> Report:
    """Return the page."""
    question, limits = answer.question, answer.limits
    notes = [f"Workload: {question.demand}.", f"Stage times: {question.times.source}."]
    if answer.candidates:
        notes.insert(0, f"**{recommend(answer.candidates)}**")
        notes.append(
            f"Limits at p99 of every kind of request: TTFT {limits.ttft_s:g} s, with pictures "
            f"{limits.ttft_pictures_s:g} s, TPOT {limits.tpot_s:g} s."
        )
    notes.append(
        f"Simulated, not measured: {question.count:,} requests at each rate, seed {question.seed}; "
        f"router processes: {question.rules.router_workers}."
    )
    notes.append(NOT_MODELLED)
    tables = []
    if answer.measured:
        notes += answer.measured.notes
        tables.append(_lines(answer.measured.lines))
    if answer.candidates:
        tables.append(_candidates(answer.candidates))
    if answer.predictions:
        tables.append(_predictions(answer.predictions))
    if answer.study:
        tables += _study(answer.study)
    return Report(
        title="Sizing",
        command=command,
        conditions=conditions(load_before, measured=_MEASURED),
        tables=tuple(tables),
        summary=_summary(answer),
        samples=[_sample(each) for each in answer.candidates]
        + [_sample(each) for each in answer.predictions]
        + [_growth(row) for row in (answer.study.rows if answer.study else ())],
        notes=tuple(notes),
    )


def make_charts(answer: SizingAnswer) -> list[Chart]:
    """Return what is drawn; nothing for predictions alone."""
    charts = []
    if answer.candidates:
        charts.append(
            Chart(
                title="Highest rate within the limits",
                across=tuple(str(each.deployment) for each in answer.candidates),
                across_label="deployment",
                up_label="requests/s",
                series=(
                    Series(name="rate", values=tuple(each.rate for each in answer.candidates)),
                ),
                bars=True,
            )
        )
    if answer.study:
        by_size = _by_size(answer.study)
        charts.append(
            Chart(
                title="TTFT p99 of all kinds by size",
                across=tuple(f"{size:,}" for size in by_size),
                across_label="devices",
                up_label="s",
                series=(
                    Series(
                        name="router: one process",
                        values=tuple(_worst_ttft(rows[0].outcome) for rows in by_size.values()),
                    ),
                    Series(
                        name="as many as needed",
                        values=tuple(_worst_ttft(rows[-1].outcome) for rows in by_size.values()),
                    ),
                ),
            )
        )
    return charts


def _lines(lines: Sequence[Line]) -> Table:
    return Table(
        title="Measured stages: lines by least squares, ms",
        columns=("stage", "at zero", "each", "of", "residual, rms", "largest", "points"),
        rows=tuple(
            (
                line.name,
                _ms(line.base_s),
                f"{line.slope_s * 1000:.3g}",
                line.across,
                _ms(line.rms_s),
                _ms(max(line.residuals_s, key=abs)),
                ", ".join(f"{place:g}: {_ms(seconds)}" for place, seconds in line.points),
            )
            for line in lines
        ),
    )


def _candidates(candidates: Sequence[Candidate]) -> Table:
    replicas = candidates[0]
    rows = []
    for each in candidates:
        text, pictures = (each.outcome.kinds.get(kind) for kind in ("text", "pictures"))
        stage, share = each.fullest
        rows.append(
            (
                str(each.deployment),
                f"{each.rate / replicas.rate:.2f}" if replicas.rate else "–",
                f"{each.rate:.3g}",
                f"{each.goodput:.3g}",
                f"{text.ttft_p99:.3g}" if text else "–",
                f"{pictures.ttft_p99:.3g}" if pictures else "–",
                _ms(max(kind.tpot_p99 for kind in each.outcome.kinds.values())),
                f"{stage} {share:.0%}",
                each.limit or "–",
            )
        )
    return Table(
        title="Highest rate within the limits, by how the devices are used",
        columns=(
            "deployment",
            "by replicas",
            "requests/s",
            "goodput/s",
            "TTFT p99 text, s",
            "pictures, s",
            "TPOT p99, ms",
            "nearest to full",
            "breaks first above",
        ),
        rows=tuple(rows),
    )


def _predictions(predictions: Sequence[Prediction]) -> Table:
    return Table(
        title="Predicted at rates that were asked for; ms",
        columns=(
            "requests/s, deployment",
            "kind",
            "TTFT p50",
            "TTFT p99",
            "TPOT p50",
            "TPOT p99",
            "busiest stage",
        ),
        rows=tuple(
            (
                f"{each.asked:g}, {each.deployment}",
                kind,
                *map(_ms, (seen.ttft_p50, seen.ttft_p99, seen.tpot_p50, seen.tpot_p99)),
                "{} {:.0%}".format(*max(each.outcome.busy.items(), key=lambda one: one[1])),
            )
            for each in predictions
            for kind, seen in each.outcome.kinds.items()
        ),
    )


def _study(study: Study) -> list[Table]:
    sizes = [rows[-1] for rows in _by_size(study).values()]
    grows = Table(
        title=f"What grows, at {study.rate_per_device:.3g} requests/s for each device",
        columns=(
            "devices",
            "deployment",
            "requests/s",
            "router, cores",
            "processes needed",
            "control messages/s",
            "pairs",
            "connections kept",
            "items that open one",
            "health asked every, s",
            "router memory, MB",
        ),
        rows=tuple(
            (
                f"{row.deployment.devices:,}",
                str(row.deployment),
                f"{row.rate:,.0f}",
                f"{row.router_cores:.2f}",
                f"{row.workers_needed}",
                f"{row.messages:,.0f}",
                f"{row.pairs:,}",
                f"{row.connections:,}",
                f"{row.reconnected:.0%}",
                f"{row.health_age_s:.0f}",
                f"{row.router_bytes / 1e6:,.1f}",
            )
            for row in sizes
        ),
    )
    seen = Table(
        title="What the simulation saw",
        columns=(
            "devices, router processes",
            "within limits",
            "TTFT p99 text, s",
            "pictures, s",
            "TPOT p99, ms",
            "router busy",
            "router waited, longest, s",
            "engines busy",
            "encoders busy",
            "events",
            "took, s",
        ),
        rows=tuple(
            (
                f"{row.deployment.devices:,}, {row.workers}",
                f"{row.within:.1%}",
                *(
                    f"{row.outcome.kinds[kind].ttft_p99:.3g}" if kind in row.outcome.kinds else "–"
                    for kind in ("text", "pictures")
                ),
                _ms(max(kind.tpot_p99 for kind in row.outcome.kinds.values())),
                f"{row.outcome.busy['router']:.0%}",
                f"{row.outcome.longest_wait_s['router']:.3g}",
                f"{row.outcome.engines_busy:.0%}",
                f"{row.outcome.busy.get('encode', 0.0):.0%}",
                f"{row.outcome.events:,}",
                f"{row.wall_s:.1f}",
            )
            for row in study.rows
        ),
    )
    knee = Table(
        title="Where so many processes of the router are full",
        columns=("processes", "devices"),
        rows=tuple((str(workers), f"{devices:,}") for workers, devices in study.knees.items()),
    )
    bounds = Table(
        title="Limits of the package with this ratio, the nearest first",
        columns=("limit", "value", "kept up to devices", "beyond"),
        rows=tuple(
            (bound.name, f"{bound.value:,}", f"{bound.devices:,}", bound.beyond)
            for bound in study.bounds
        ),
    )
    return [grows, seen, knee, bounds] if study.knees else [grows, seen, bounds]


def _by_size(study: Study) -> dict[int, list[Growth]]:
    found: dict[int, list[Growth]] = {}
    for row in study.rows:
        found.setdefault(row.deployment.devices, []).append(row)
    return found


def _worst_ttft(outcome: Outcome) -> float:
    return max(kind.ttft_p99 for kind in outcome.kinds.values())


def _summary(answer: SizingAnswer) -> Plain:
    question, limits = answer.question, answer.limits
    summary: dict[str, Plain] = {
        "workload": question.demand.model_dump(mode="json"),
        "stages": question.times.model_dump(mode="json"),
        "limits": {
            "ttft_s": limits.ttft_s,
            "ttft_pictures_s": limits.ttft_pictures_s,
            "tpot_s": limits.tpot_s,
        },
    }
    if answer.candidates:
        best = max(answer.candidates, key=lambda each: each.rate)
        summary["recommendation"] = recommend(answer.candidates)
        summary["best"] = {
            "encode": best.deployment.encoders,
            "prefill_decode"
            if best.deployment.encoders
            else "one_process": best.deployment.engines,
            "rate": best.rate,
            "goodput": best.goodput,
        }
    if answer.measured:
        summary["lines"] = [
            {
                "name": line.name,
                "base_s": line.base_s,
                "slope_s": line.slope_s,
                "residuals_s": line.residuals_s,
                "points": line.points,
            }
            for line in answer.measured.lines
        ]
    if answer.study:
        summary["knees"] = {str(key): value for key, value in answer.study.knees.items()}
    return summary


def _sample(each: Candidate | Prediction) -> Plain:
    rate = each.rate if isinstance(each, Candidate) else each.asked
    sample = {"deployment": str(each.deployment), "rate": rate, **_outcome(each.outcome)}
    if isinstance(each, Candidate):
        sample |= {
            "goodput": each.goodput,
            "limit": each.limit,
            "capacities": dict(each.capacities),
        }
    return sample


def _growth(row: Growth) -> Plain:
    return {
        "deployment": str(row.deployment),
        "rate": row.rate,
        "workers": row.workers,
        "workers_needed": row.workers_needed,
        "router_cores": row.router_cores,
        "messages": row.messages,
        "pairs": row.pairs,
        "connections": row.connections,
        "reconnected": row.reconnected,
        "health_age_s": row.health_age_s,
        "router_bytes": row.router_bytes,
        "within": row.within,
        **_outcome(row.outcome),
    }


def _outcome(outcome: Outcome) -> dict[str, Plain]:
    return {
        "kinds": {
            kind: {
                "count": seen.count,
                "ttft_p50": seen.ttft_p50,
                "ttft_p99": seen.ttft_p99,
                "tpot_p50": seen.tpot_p50,
                "tpot_p99": seen.tpot_p99,
            }
            for kind, seen in outcome.kinds.items()
        },
        "busy": dict(outcome.busy),
        "queued": dict(outcome.queued),
        "longest_wait_s": dict(outcome.longest_wait_s),
        "longest_stall_s": outcome.longest_stall_s,
        "local_items": outcome.local_items,
        "transferred": outcome.transferred,
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g}" if seconds < 1 else f"{seconds * 1000:,.0f}"
