"""Turns of sides as one table of ratios, the times, and the samples. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from epd_benchmarks.load.serve import KINDS, QUANTILES, QUANTITIES
from epd_benchmarks.load.sides import LoadSetting
from epd_benchmarks.report import Report, Row
from epd_benchmarks.stats import Ratio, quantile

_COMPARED = (
    ("all", "TTFT", "p99"),
    ("text", "TTFT", "p99"),
    ("images", "TTFT", "p50"),
    ("images", "TTFT", "p99"),
    ("all", "TPOT", "p99"),
    ("text", "longest ITL", "p50"),
    ("images", "E2E", "p50"),
)
"""By which users decide, whichever side they favour."""

Turn = dict[str, Any]
"""The figures of one side in one round of a point."""


def make_report(turns: Sequence[Turn], setting: LoadSetting) -> Report:
    """Return the report of the turns so far."""
    first, *others = (side.name for side in setting.sides)
    sides = {side.name: side.what for side in setting.sides}
    notes = [
        "Ratios are the first side by another, each figure of a round by that of the same round: "
        "below 1 the first side is sooner, or takes less; bold is a loss of the first side. Given "
        "is the median of the rounds, with the lowest and the highest.",
        f"{setting.allotment} Every side gets the same requests in the same round, in turns, from "
        "vllm bench serve of the installed vLLM.",
        "TPOT: time per token after the first. Longest ITL: the longest stall within a response. "
        "Times are medians of the rounds.",
    ]
    if any(side.kind == "replicas" and side.count > 1 for side in setting.sides):
        notes.append(
            "Requests to replicas go to them in turns, from one process of clients each, at "
            "intervals of a gamma distribution: their sum is a Poisson process."
        )
    tables = {
        f"{first} by the other sides": [*_ratios(turns, first, others)],
        "Times in ms: " + " / ".join(QUANTILES): [*_times(turns)],
        "Throughput of vllm bench serve, CPU time and memory": [*_usage(turns)],
    }
    return Report(
        title=f"Under load: {', '.join(f'{name} ({what})' for name, what in sides.items())}",
        notes=tuple(notes),
        tables={title: rows for title, rows in tables.items() if rows},
        summary={"sides": {**sides}, "platform": setting.platform},
        samples=turns,
    )


def _each(turns: Sequence[Turn]) -> Iterator[tuple[str, list[Turn]]]:
    for key in dict.fromkeys((turn["point"], turn["side"]) for turn in turns):
        yield ": ".join(key), [turn for turn in turns if (turn["point"], turn["side"]) == key]


def _time(kind: str, quantity: str, name: str) -> Callable[[Turn], float | None]:
    return lambda turn: turn["times_s"].get(kind, {}).get(quantity, {}).get(name)


def _cpu(turn: Turn) -> float | None:
    return sum(turn["cpu_s"].values()) / turn["requests"]["all"] or None


def _memory(turn: Turn) -> float | None:
    return sum(turn["memory_bytes"].values()) or None


def _ratios(turns: Sequence[Turn], first: str, others: Sequence[str]) -> Iterator[Row]:
    figures = {f"{what} {name}, {kind}": _time(kind, what, name) for kind, what, name in _COMPARED}
    figures |= {"CPU time": _cpu, "PSS": _memory}
    for point in dict.fromkeys(turn["point"] for turn in turns):
        by_side = {
            side: {t["round"]: t for t in turns if (t["point"], t["side"]) == (point, side)}
            for side in (first, *others)
        }
        for other in others:
            rounds = by_side[first].keys() & by_side[other].keys()
            if not rounds:
                continue
            row = {"load": point, "by": other}
            for title, figure in figures.items():
                pairs = [(figure(by_side[first][n]), figure(by_side[other][n])) for n in rounds]
                row[title] = _shown([own / peer for own, peer in pairs if own and peer])
            counts = Counter[str]()
            for number in rounds:
                counts.update(by_side[first][number]["requests"])
            row["rounds"] = str(len(rounds))
            yield row | {"requests, with images": f"{counts['all']}, {counts['images']}"}


def _shown(ratios: Sequence[float]) -> str:
    if not ratios:
        return "–"
    found = Ratio(median=quantile(ratios, 0.5), low=min(ratios), high=max(ratios))
    median, _, spread = str(found).partition(" ")
    return f"**{median}** {spread}" if float(median) > 1 else f"{median} {spread}"


def _median(turns: Sequence[Turn], figure: Callable[[Turn], float | None], scale: float) -> str:
    found = [value for value in map(figure, turns) if value is not None]
    return f"{quantile(found, 0.5) * scale:.1f}" if found else "–"


def _times(turns: Sequence[Turn]) -> Iterator[Row]:
    for name, of_side in _each(turns):
        for kind in KINDS:
            if count := sum(turn["requests"].get(kind, 0) for turn in of_side):
                row = {"load: side: requests": f"{name}: {kind}"}
                for quantity in QUANTITIES:
                    row[quantity] = " / ".join(
                        _median(of_side, _time(kind, quantity, each), 1e3) for each in QUANTILES
                    )
                yield row | {"requests": str(count)}


def _usage(turns: Sequence[Turn]) -> Iterator[Row]:
    for name, of_side in _each(turns):
        used_s, memory = Counter[str](), Counter[str]()
        for turn in of_side:
            used_s.update(turn["cpu_s"])
            memory |= Counter(turn["memory_bytes"])
        count = sum(turn["requests"]["all"] for turn in of_side)
        yield {
            "load: side": name,
            **{
                title: _median(of_side, lambda turn, key=key: turn["vllm"][key], 1)  # type: ignore[misc]
                for title, key in (
                    ("requests/s", "request_throughput"),
                    ("goodput, requests/s", "request_goodput"),
                    ("output tokens/s", "output_throughput"),
                )
            },
            "failed": str(sum(turn["failed"] for turn in of_side)),
            "CPU, ms a request": f"{sum(used_s.values()) / count * 1e3:.0f}",
            "by process": ", ".join(f"{p} {s / count * 1e3:.0f}" for p, s in used_s.items()) or "–",
            "PSS at most, MiB": ", ".join(f"{p} {b / 2**20:.0f}" for p, b in memory.items()) or "–",
        }
