"""Turns the results of `serve` into tables, charts and a summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from epd_portable.bench.chart import Chart, Series
from epd_portable.bench.client import Timing
from epd_portable.bench.cpu_time import CpuTime
from epd_portable.bench.report import Plain, Report, Table, conditions, format_bytes
from epd_portable.bench.serve import CONCURRENT, ONE_PROCESS, SPLIT, Baseline, Results
from epd_portable.bench.stats import Ratio, paired_ratio, quantile, summarize
from epd_portable.bench.traces import Handover

_QUANTITIES: dict[str, Callable[[Timing], float]] = {
    "ttft_s": lambda timing: timing.ttft_s,
    "tpot_s": lambda timing: timing.tpot_s,
    "longest_gap_s": lambda timing: timing.longest_gap_s,
    "latency_s": lambda timing: timing.latency_s,
}
_CPU: dict[str, Callable[[CpuTime], float]] = {
    "prefill_decode_s": lambda cpu: cpu.prefill_decode_s,
    "whole_s": lambda cpu: cpu.whole_s,
}
_TITLES = ("TTFT", "TPOT", "longest gap", "latency")
_PARTS = ("total_s", "grant_wait_s", "write_s", "notice_s", "place_s")

_PEERS: dict[Baseline, str] = {
    ONE_PROCESS: "plain vLLM in one process",
    CONCURRENT: "the same with transfer.media concurrent",
}

Groups = dict[tuple[str, str], list[Timing]]
"""Timings by kind and side."""


def make_report(results: Results, *, command: str, load_before: float) -> Report:
    """Return the report of `epd_portable.bench.serve.measure`'s results."""
    groups = by_kind_and_side(results)
    tables = [_startup(results), _absolute(groups), _cpu(results), _provenance(results)]
    baseline = _baseline(results)
    if baseline is not None:
        tables.insert(0, _ratios(groups, baseline))
    if results.handovers:
        tables.append(_handovers(results.handovers))
    return Report(
        title=f"A topology against {_PEERS[baseline]}" if baseline else "A topology",
        command=command,
        conditions=conditions(load_before),
        notes=(
            "Ratios are the topology by its peer, pair by pair: below 1 the topology is faster. "
            "Given is the median of the pairs with their quartiles, which show the noise.",
            "Both sides ran on the same cores, were started at the same time and stayed up; only "
            "one was asked at a time, in turns. Topologies wrote event traces, plain vLLM not.",
            "TTFT: time to the first token. TPOT: time per token after it. Longest gap: between "
            "two tokens of an answer. All are seen by the client, which shares the cores: tokens "
            "that reach it together have no time between them.",
            "CPU seconds are those of a side's processes while it was asked, divided by the "
            "requests.",
        ),
        tables=tuple(tables),
        summary=_summary(results, groups),
        samples=[dataclasses.asdict(item) for item in (*results.samples, *results.handovers)],
    )


def make_charts(results: Results) -> list[Chart]:
    """Return TTFT and latency by kind, a bar for each side."""
    groups = by_kind_and_side(results)
    kinds = tuple(dict.fromkeys(kind for kind, _ in groups))
    return [
        Chart(
            title=title,
            across=kinds,
            across_label="",
            up_label="median, ms",
            series=tuple(
                Series(
                    name=side,
                    values=tuple(_median_ms(groups[kind, side], quantity) for kind in kinds),
                )
                for side in results.startup_s
            ),
            bars=True,
        )
        for title, quantity in (
            ("Time to the first token", "ttft_s"),
            ("Time to the whole answer", "latency_s"),
        )
    ]


def by_kind_and_side(results: Results) -> Groups:
    """Return the timings of each kind and side, in the order of measuring."""
    groups: Groups = {
        (sample.kind, side): [] for sample in results.samples for side in results.startup_s
    }
    for sample in results.samples:
        groups[sample.kind, sample.side].append(sample.timing)
    return groups


def _baseline(results: Results) -> Baseline | None:
    return next((side for side in _PEERS if side in results.startup_s), None)


def _ratios(groups: Groups, baseline: Baseline) -> Table:
    rows = []
    for kind in dict.fromkeys(kind for kind, _ in groups):
        split, one = groups[kind, SPLIT], groups[kind, baseline]
        ratios = [_ratio(split, one, pick) for pick in _QUANTITIES.values()]
        cells = ["–" if ratio is None else str(ratio) for ratio in ratios]
        rows.append((kind, *cells, str(len(split))))
    return Table(
        title=f"Split by {baseline}",
        columns=("request", *_TITLES, "pairs"),
        rows=tuple(rows),
    )


def _ratio(
    split: Sequence[Timing], one: Sequence[Timing], pick: Callable[[Timing], float]
) -> Ratio | None:
    """Compare a quantity; pairs in which an answer has none (a single piece) do not count."""
    return _known_ratio((pick(left), pick(right)) for left, right in zip(split, one, strict=True))


def _known_ratio(pairs: Iterable[tuple[float, float]]) -> Ratio | None:
    known = [pair for pair in pairs if min(pair) > 0]
    return paired_ratio(*zip(*known, strict=True)) if known else None


def _startup(results: Results) -> Table:
    seconds = results.startup_s
    baseline = _baseline(results)
    one = seconds[baseline] if baseline else None
    rows = [
        (side, f"{value / one:.2f}" if one else "–", f"{value:.1f}")
        for side, value in seconds.items()
    ]
    return Table(
        title="Start-up, once; the topology's ends after its warm-up requests",
        columns=("side", f"ratio to {baseline}" if baseline else "ratio", "s"),
        rows=tuple(rows),
    )


def _absolute(groups: Groups) -> Table:
    rows = []
    for (kind, side), timings in groups.items():
        ttft = summarize([timing.ttft_s for timing in timings])
        latency = summarize([timing.latency_s for timing in timings])
        gaps = [gap for timing in timings for gap in timing.gaps_s]
        rows.append(
            (
                f"{kind}: {side}",
                f"{ttft.median * 1000:.1f}",
                f"{ttft.p90 * 1000:.1f}",
                f"{_median_ms(timings, 'tpot_s'):.2f}",
                f"{quantile(gaps, 0.99) * 1000:.1f}" if gaps else "–",
                f"{latency.median * 1000:.1f}",
                f"{latency.p90 * 1000:.1f}",
                f"{latency.p99 * 1000:.1f}",
            )
        )
    return Table(
        title="The times themselves, in ms",
        columns=(
            "request: side",
            "TTFT median",
            "TTFT p90",
            "TPOT median",
            "ITL p99",
            "latency median",
            "latency p90",
            "latency p99",
        ),
        rows=tuple(rows),
    )


def _cpu_s(results: Results, kind: str, side: str, quantity: str) -> list[float]:
    """Return CPU seconds of each request."""
    pick = _CPU[quantity]
    return [pick(each.cpu) for each in results.samples if (each.kind, each.side) == (kind, side)]


def _cpu(results: Results) -> Table:
    baseline = _baseline(results)
    rows = []
    for kind, side in by_kind_and_side(results):
        cells = []
        for quantity in _CPU:
            used = _cpu_s(results, kind, side, quantity)
            ratio = None
            if baseline is not None and side != baseline:
                peer = _cpu_s(results, kind, baseline, quantity)
                ratio = _known_ratio(zip(used, peer, strict=True))
            cells += ["–" if ratio is None else str(ratio), f"{quantile(used, 0.5) * 1000:.0f}"]
        rows.append((f"{kind}: {side}", *cells))
    return Table(
        title="CPU time per request: ratio, and median in ms",
        columns=(
            "request: side",
            "prefill+decode instance, ratio",
            "ms",
            "whole side, ratio",
            "ms",
        ),
        rows=tuple(rows),
    )


def _provenance(results: Results) -> Table:
    found = results.provenance
    rows = [("pictures sent to the topology", str(found.asked))]
    rows += [(f"transferred by {path}", str(count)) for path, count in found.by_path.items()]
    rows += [
        (f"encoded by {instance}", str(count)) for instance, count in sorted(found.encoded.items())
    ]
    rows += [
        ("encoded by a prefill+decode instance", str(found.local)),
        ("transfers that failed", str(found.failed)),
    ]
    return Table(title="Where the encoder outputs came from", columns=("", "items"), rows=(*rows,))


def _handovers(ways: Sequence[Handover]) -> Table:
    groups: dict[tuple[str, int], list[Handover]] = {}
    for way in sorted(ways, key=lambda way: (way.path, way.nbytes)):
        groups.setdefault((way.path, way.nbytes), []).append(way)
    rows = []
    for (path, nbytes), group in groups.items():
        total = summarize([way.total_s for way in group])
        rows.append(
            (
                f"{path}, {format_bytes(nbytes)}",
                f"{total.p90 * 1000:.2f}",
                *(
                    f"{quantile([getattr(way, part) for way in group], 0.5) * 1000:.2f}"
                    for part in _PARTS
                ),
                str(total.count),
            )
        )
    return Table(
        title="From output to placed tensor inside the engines, in ms: p90, then medians",
        columns=(
            "path, size",
            "p90",
            "median",
            "wait for grant",
            "write",
            "written to landed",
            "landed to placed",
            "items",
        ),
        rows=tuple(rows),
    )


def _summary(results: Results, groups: Groups) -> Plain:
    kinds: dict[str, Plain] = {}
    for kind in dict.fromkeys(kind for kind, _ in groups):
        sides: dict[str, Plain] = {
            side: {
                name: dataclasses.asdict(summarize([*map(pick, groups[kind, side])]))
                for name, pick in _QUANTITIES.items()
            }
            for side in results.startup_s
        }
        baseline = _baseline(results)
        if baseline is not None:
            ratios = {
                name: _ratio(groups[kind, SPLIT], groups[kind, baseline], pick)
                for name, pick in _QUANTITIES.items()
            }
            sides["ratio"] = {
                name: None if ratio is None else dataclasses.asdict(ratio)
                for name, ratio in ratios.items()
            }
        kinds[kind] = sides
    return {
        "startup_s": dict(results.startup_s),
        "kinds": kinds,
        "cpu_s": {
            f"{kind}: {side}": {
                name: dataclasses.asdict(summarize(_cpu_s(results, kind, side, name)))
                for name in _CPU
            }
            for kind, side in groups
        },
        "provenance": dataclasses.asdict(results.provenance),
    }


def _median_ms(timings: Sequence[Timing], quantity: str) -> float:
    return quantile([*map(_QUANTITIES[quantity], timings)], 0.5) * 1000
