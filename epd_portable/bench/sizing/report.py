"""Answers of `plan` as tables and a summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from epd_portable.bench.report import Plain, Report, conditions
from epd_portable.bench.sizing.search import (
    LatencyLimits,
    RatedDeployment,
    SizingQuestion,
    recommend,
)

_MEASURED = ("epd_portable.bench.sizing.engine", "epd_portable.bench.sizing.simulate")
NOT_MODELLED = (
    "Not known here: prefix and encoder caches (every picture is new), KV cache memory, the "
    "receive pool, faults, networks with contention, attention that grows with the context, how "
    "much the front takes (several routers share it), API servers that share cores with engines "
    "and encoding beside the steps (both on a CPU). Directions were predicted right where they "
    "were measured, sizes within a factor of two (docs/measurements/2026-11-sizing.md)."
)


def make_report(
    question: SizingQuestion, limits: LatencyLimits, candidates: Sequence[RatedDeployment]
) -> Report:
    """Return the page; of the candidates replicas come first."""
    best = max(candidates, key=lambda each: each.rate)
    recommendation = recommend(candidates)
    rows = [_candidate(each, candidates[0]) for each in candidates]
    return Report(
        title="Sizing",
        conditions=conditions(_MEASURED),
        tables={"Highest rate within the limits, by how the devices are used": rows},
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
            f"{question.seed}.",
            NOT_MODELLED,
        ),
    )


def _candidate(each: RatedDeployment, replicas: RatedDeployment) -> dict[str, str]:
    kinds = each.outcome.kinds
    text, pictures = (
        f"{kinds[kind].ttft_p95:.3g}" if kind in kinds else "–" for kind in ("text", "pictures")
    )
    stage, share = max(each.outcome.busy.items(), key=lambda busy: busy[1])
    return {
        "deployment": str(each.deployment),
        "by replicas": f"{each.rate / replicas.rate:.2f}" if replicas.rate else "–",
        "requests/s": f"{each.rate:.3g}",
        "TTFT p95 text, s": text,
        "pictures, s": pictures,
        "TPOT p95, ms": _ms(max(kind.tpot_p95 for kind in kinds.values())),
        "owed, s: encode": _owed(each, "encode"),
        "answer": _owed(each, "answer"),
        "busiest": f"{stage} {share:.0%}",
        "breaks first above": each.limit or "–",
    }


def _sample(each: RatedDeployment) -> Plain:
    return {
        "deployment": str(each.deployment),
        "rate": each.rate,
        **dataclasses.asdict(each.outcome),
        "limit": each.limit,
    }


def _owed(each: RatedDeployment, stage: str) -> str:
    owed_s = each.outcome.owed_s.get(stage)
    return "–" if owed_s is None else f"{owed_s:.2g}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g}" if seconds < 1 else f"{seconds * 1000:,.0f}"
