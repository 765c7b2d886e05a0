"""Tables and timelines of what event traces say of the turns of a topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epd_portable.bench.chart import TimelineChart, TimelineRow
from epd_portable.bench.load.plan import LoadPoint
from epd_portable.bench.load.record import SideTurn, TracedTurn
from epd_portable.bench.load.stages import STAGES, RequestStages
from epd_portable.bench.report import Table, format_bytes
from epd_portable.bench.stats import quantile
from epd_portable.bench.traces import Handover

_PARTS = ("total_s", "grant_wait_s", "write_s", "notice_s", "place_s")
_SAMPLES = 12

Rounds = Mapping[LoadPoint, Mapping[str, Sequence[SideTurn]]]


def stage_tables(rounds: Rounds) -> list[Table]:
    """Return where the time of requests and items went, and where encoder outputs came from."""
    return [_stages(rounds), _handovers(rounds), _origins(rounds)]


def timelines(rounds: Rounds) -> list[TimelineChart]:
    """Return some requests of the last turn at each side's highest point, by their stages."""
    found = []
    for side in dict.fromkeys(side for by_side in rounds.values() for side in by_side):
        traced = [
            (point, turn.traced)
            for point, by_side in rounds.items()
            for turn in by_side[side]
            if turn.traced is not None and turn.traced.stages
        ]
        if not traced:
            continue
        point, last = traced[-1]
        found.append(
            TimelineChart(
                title=f"{side} at {point.pace}: requests by stage",
                across_label="s",
                rows=tuple(map(_row, _sample(last))),
            )
        )
    return found


def _sample(traced: TracedTurn) -> list[RequestStages]:
    """Return requests that follow each other, from one before the first with pictures on."""
    first = next((index for index, each in enumerate(traced.stages) if each.kind == "pictures"), 0)
    begin = max(0, min(first - 1, len(traced.stages) - _SAMPLES))
    return list(traced.stages[begin : begin + _SAMPLES])


def _row(each: RequestStages) -> TimelineRow:
    parts = tuple((name, each.sent_s + end_s) for name, end_s in each.ends_s.items())
    return TimelineRow(name=f"{each.kind} {each.index}", begin=each.sent_s, parts=parts)


def _traced(turns: Sequence[SideTurn]) -> list[TracedTurn]:
    return [turn.traced for turn in turns if turn.traced is not None]


def _stages(rounds: Rounds) -> Table:
    rows = []
    for point, by_side in rounds.items():
        for side, turns in by_side.items():
            for kind in ("text", "pictures"):
                group = [
                    each for traced in _traced(turns) for each in traced.stages if each.kind == kind
                ]
                if not group:
                    continue
                cells = []
                for stage in STAGES:
                    lengths = [each.lengths_s[stage] for each in group if stage in each.lengths_s]
                    cells.append(
                        f"{quantile(lengths, 0.5) * 1000:.0f} / {quantile(lengths, 0.9) * 1000:.0f}"
                        if lengths
                        else "–"
                    )
                rows.append((f"{point.key}: {side}: {kind}", *cells, str(len(group))))
    return Table(
        title="Stages of requests, in ms: p50 / p90",
        columns=("load: side: requests", *STAGES, "requests"),
        rows=tuple(rows),
    )


def _handovers(rounds: Rounds) -> Table:
    groups: dict[tuple[str, str, int], list[Handover]] = {}
    for by_side in rounds.values():
        for side, turns in by_side.items():
            for traced in _traced(turns):
                for way in traced.handovers:
                    groups.setdefault((side, way.path, way.nbytes), []).append(way)
    rows = []
    for (side, path, nbytes), group in sorted(groups.items()):
        rows.append(
            (
                f"{side}: {path}, {format_bytes(nbytes)}",
                f"{quantile([way.total_s for way in group], 0.9) * 1000:.2f}",
                *(
                    f"{quantile([getattr(way, part) for way in group], 0.5) * 1000:.2f}"
                    for part in _PARTS
                ),
                str(len(group)),
            )
        )
    return Table(
        title="From output to placed tensor inside the engines, in ms: p90, then medians",
        columns=(
            "side: path, size",
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


def _origins(rounds: Rounds) -> Table:
    counts: dict[tuple[str, str], int] = {}

    def add(side: str, what: str, count: int) -> None:
        counts[side, what] = counts.get((side, what), 0) + count

    for by_side in rounds.values():
        for side, turns in by_side.items():
            for traced in _traced(turns):
                origin = traced.provenance
                add(side, "pictures sent", origin.asked)
                for path, count in origin.by_path.items():
                    add(side, f"transferred by {path}", count)
                for instance, count in origin.encoded.items():
                    add(side, f"encoded by {instance}", count)
                add(side, "encoded by a prefill+decode instance", origin.local)
                add(side, "transfers that failed", origin.failed)
    return Table(
        title="Where the encoder outputs came from",
        columns=("side", "", "items"),
        rows=tuple((side, what, str(count)) for (side, what), count in counts.items()),
    )
