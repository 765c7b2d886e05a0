"""Answers of `plan` as tables and a summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from epd_portable.bench.report import Plain, Report, Table, conditions
from epd_portable.bench.sizing.search import (
    LatencyLimits,
    RatedDeployment,
    SizingQuestion,
    recommend,
    switching_bound,
)

_MEASURED = ("epd_portable.bench.sizing.engine", "epd_portable.bench.sizing.simulate")
NOT_MODELLED = (
    "Not known here: prefix and encoder caches (every picture is new), KV cache memory, the "
    "receive pool, faults, networks with contention, attention that grows with the context, API "
    "servers that share cores with engines and encoding beside the steps (both on a CPU). "
    "Directions were predicted right where they were measured, sizes within a factor of two "
    "(docs/measurements/2026-11-sizing.md)."
)


def make_report(
    question: SizingQuestion,
    limits: LatencyLimits,
    candidates: Sequence[RatedDeployment],
    *,
    command: str,
    load_before: float,
) -> Report:
    """Return the page of a search; replicas come first."""
    recommendation = recommend(candidates)
    best = max(candidates, key=lambda each: each.rate)
    return Report(
        title="Sizing",
        command=command,
        conditions=conditions(load_before, measured=_MEASURED),
        tables=(
            Table.of(
                "Highest rate within the limits, by how the devices are used",
                (_candidate(each, candidates[0]) for each in candidates),
            ),
        ),
        summary={
            "workload": question.workload.model_dump(mode="json"),
            "stages": question.times.model_dump(mode="json"),
            "limits": dataclasses.asdict(limits),
            "recommendation": recommendation,
            "best": {**dataclasses.asdict(best.deployment), "rate": best.rate},
        },
        samples=[_sample(each) for each in candidates],
        notes=(
            f"**{recommendation}**",
            f"Limits at p95 of every kind of request: TTFT {limits.ttft_s:g} s, with pictures "
            f"{limits.ttft_pictures_s:g} s, TPOT {limits.tpot_s:g} s.",
            f"Workload: {question.workload}.",
            f"Stage times: {question.times.source}.",
            f"Simulated, not measured: {question.count:,} requests at each rate, seed "
            f"{question.seed}; routers: {question.rules.routers}.",
            NOT_MODELLED,
        ),
    )


def make_switching_report(
    questions: Sequence[SizingQuestion],
    limits: LatencyLimits,
    found: Sequence[Sequence[RatedDeployment]],
    *,
    command: str,
    load_before: float,
) -> Report:
    """Return the page of several workloads: what switching roles between them could gain.

    Raises:
        ConfigError: See `switching_bound`.
    """
    asked = questions[0]
    bound = switching_bound(found, replicas=asked.rules.elastic_threshold is not None)
    rows = []
    for way in zip(*found, strict=True):
        shares = [each.rate / most for each, most in zip(way, bound.best, strict=True)]
        row = {"deployment": str(way[0].deployment)}
        for number, (each, share) in enumerate(zip(way, shares, strict=True), 1):
            row[f"workload {number}, requests/s"] = f"{each.rate:.3g}"
            row[f"{number} of its best"] = f"{share:.2f}"
        rows.append(row | {"least": f"{min(shares):.2f}"})
    return Report(
        title="Switching roles",
        command=command,
        conditions=conditions(load_before, measured=_MEASURED),
        tables=(Table.of("Highest rate within the limits, by workload", rows),),
        summary={
            "workloads": [each.workload.model_dump(mode="json") for each in questions],
            "stages": asked.times.model_dump(mode="json"),
            "limits": dataclasses.asdict(limits),
            "gain": bound.gain,
            "best": bound.best,
            "fixed": dataclasses.asdict(bound.fixed),
            "recommendation": str(bound),
        },
        samples=[_sample(each) for of_one in found for each in of_one],
        notes=(
            f"**{bound}**",
            *(f"Workload {number}: {each.workload}." for number, each in enumerate(questions, 1)),
            f"Stage times: {asked.times.source}.",
            NOT_MODELLED,
        ),
    )


def _candidate(each: RatedDeployment, replicas: RatedDeployment) -> dict[str, str]:
    kinds = each.outcome.kinds
    text, pictures = (
        f"{kinds[kind].ttft_p95:.3g}" if kind in kinds else "–" for kind in ("text", "pictures")
    )
    stage, share = each.fullest
    return {
        "deployment": str(each.deployment),
        "by replicas": f"{each.rate / replicas.rate:.2f}" if replicas.rate else "–",
        "requests/s": f"{each.rate:.3g}",
        "TTFT p95 text, s": text,
        "pictures, s": pictures,
        "TPOT p95, ms": _ms(max(kind.tpot_p95 for kind in kinds.values())),
        "owed, s: encode": _owed(each, "encode"),
        "answer": _owed(each, "answer"),
        "nearest to full": f"{stage} {share:.0%}",
        "breaks first above": each.limit or "–",
    }


def _sample(each: RatedDeployment) -> Plain:
    outcome = each.outcome
    return {
        "deployment": str(each.deployment),
        "rate": each.rate,
        "kinds": {kind: dataclasses.asdict(seen) for kind, seen in outcome.kinds.items()},
        "busy": dict(outcome.busy),
        "owed_s": dict(outcome.owed_s),
        "longest_stall_s": outcome.longest_stall_s,
        "local_items": outcome.local_items,
        "transferred": outcome.transferred,
        "limit": each.limit,
        "capacities": dict(each.capacities),
    }


def _owed(each: RatedDeployment, stage: str) -> str:
    owed_s = each.outcome.owed_s.get(stage)
    return "–" if owed_s is None else f"{owed_s:.2g}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g}" if seconds < 1 else f"{seconds * 1000:,.0f}"
