"""Answers of `plan` as tables and a summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from epd_portable.bench.report import Plain, Report, Table, conditions
from epd_portable.bench.sizing.search import (
    LatencyLimits,
    RatedDeployment,
    SizingQuestion,
    SwitchingBound,
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
    questions: Sequence[SizingQuestion],
    limits: LatencyLimits,
    found: Sequence[Sequence[RatedDeployment]],
) -> Report:
    """Return the page; of several workloads it says what switching roles between them could gain.

    Args:
        found: Of each question, in their order; replicas come first.

    Raises:
        ConfigError: See `switching_bound`.
    """
    asked, candidates = questions[0], found[0]
    best = max(candidates, key=lambda each: each.rate)
    if len(questions) > 1:
        bound = switching_bound(found, replicas=asked.elastic)
        title, table, recommendation = "Switching roles", "by workload", str(bound)
        rows = [_by_workload(way, bound) for way in zip(*found, strict=True)]
        answer: dict[str, Plain] = {
            "gain": bound.gain,
            "best": bound.best,
            "fixed": dataclasses.asdict(bound.fixed),
        }
    else:
        title, table, recommendation = (
            "Sizing",
            "by how the devices are used",
            recommend(candidates),
        )
        rows = [_candidate(each, candidates[0]) for each in candidates]
        answer = {"best": {**dataclasses.asdict(best.deployment), "rate": best.rate}}
    return Report(
        title=title,
        conditions=conditions(_MEASURED),
        tables=(Table.of(f"Highest rate within the limits, {table}", rows),),
        summary={
            "workloads": [each.workload.model_dump(mode="json") for each in questions],
            "stages": asked.times.model_dump(mode="json"),
            "limits": dataclasses.asdict(limits),
            "recommendation": recommendation,
            **answer,
        },
        samples=[_sample(each) for of_one in found for each in of_one],
        notes=(
            f"**{recommendation}**",
            f"Limits at p95 of every kind of request: TTFT {limits.ttft_s:g} s, with pictures "
            f"{limits.ttft_pictures_s:g} s, TPOT {limits.tpot_s:g} s.",
            *(f"Workload {number}: {each.workload}." for number, each in enumerate(questions, 1)),
            f"Stage times: {asked.times.source}.",
            f"Simulated, not measured: {asked.count:,} requests at each rate, seed {asked.seed}.",
            NOT_MODELLED,
        ),
    )


def _by_workload(way: Sequence[RatedDeployment], bound: SwitchingBound) -> dict[str, str]:
    shares = [each.rate / most for each, most in zip(way, bound.best, strict=True)]
    row = {"deployment": str(way[0].deployment)}
    for number, (each, share) in enumerate(zip(way, shares, strict=True), 1):
        row[f"workload {number}, requests/s"] = f"{each.rate:.3g}"
        row[f"{number} of its best"] = f"{share:.2f}"
    return row | {"least": f"{min(shares):.2f}"}


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
