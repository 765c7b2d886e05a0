"""Results of ``epd-bench router`` as tables and a summary: a row a figure, a column a side."""

from __future__ import annotations

import dataclasses
import math

from epd_portable.bench.report import Plain, Report, Table, conditions
from epd_portable.bench.router.cases import Case, CaseFigure
from epd_portable.bench.router.measure import CaseResults
from epd_portable.bench.router.stand import Side
from epd_portable.bench.stats import Ratio, paired_ratio, quantile

NONE = "–"
_MEASURED = (
    "epd_portable.router.exchange",
    "epd_portable.router.http.server_connection",
    "epd_portable.router.http.upstream_connection",
)
_CLOCKS = (("CPU", "CPU time"), ("wall", "Wall time"), ("counted", "Counted"))


def series(results: CaseResults, case: Case, figure: CaseFigure, side: Side) -> list[float]:
    """Return a figure of every turn of a side."""
    return [
        turn.values[figure.key]
        for turn in results.turns
        if turn.case == case.name and turn.side == side.name and figure.key in turn.values
    ]


def times_better(figure: CaseFigure, values: list[float], peers: list[float]) -> Ratio | None:
    """Return how many times better one side is than another, turn by turn; above 1 it is better.

    ``None`` if one of them has no such figure, or one that is not positive: a difference may be 0.
    """
    if not values or len(values) != len(peers) or min(*values, *peers) <= 0:
        return None
    if figure.better == "lower":
        return paired_ratio(peers, values)
    return paired_ratio(values, peers)


def reaches(figure: CaseFigure, value: float) -> bool | None:
    """Tell whether a value reaches what it should; ``None`` if that is not fixed."""
    if figure.limit is None:
        return None
    return value <= figure.limit if figure.better == "lower" else value >= figure.limit


def show(value: float) -> str:
    """Return a figure with three digits that count, or whole above 1,000."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


def make_report(results: CaseResults, *, command: str, load_before: float) -> Report:
    """Return the page of a measurement."""
    summary = _summary(results)
    tables = [
        table
        for clock, title in _CLOCKS
        for table in [_figures_table(results, clock, title)]
        if table.rows
    ]
    return Report(
        title="What the router costs",
        command=command,
        conditions=conditions(load_before, measured=_MEASURED),
        notes=_notes(results),
        tables=(*tables, _measuring_table(results)),
        summary=summary,
        samples=[dataclasses.asdict(turn) for turn in results.turns],
    )


def _pairs(results: CaseResults) -> list[tuple[Side, Side]]:
    """Return who is compared with whom: later routers with the first, all with the peer."""
    routers = [side for side in results.sides if side.kind == "router"]
    peers = [side for side in results.sides if side.kind == "proxy"]
    later = [(side, routers[0]) for side in routers[1:]]
    return later + [(side, peer) for peer in peers for side in routers]


def _figures_table(results: CaseResults, clock: str, title: str) -> Table:
    pairs = _pairs(results)
    rows = []
    for case in results.cases:
        for figure in case.figures:
            if figure.clock != clock:
                continue
            found = {side.name: series(results, case, figure, side) for side in results.sides}
            if not any(found.values()):
                continue
            ratios = [
                times_better(figure, found[side.name], found[peer.name]) for side, peer in pairs
            ]
            rows.append(
                (
                    figure.what,
                    *(_shown(ratio) for ratio in ratios),
                    *(_with_spread(found[side.name]) for side in results.sides),
                    _at_least(figure),
                    _held(results, figure, found, ratios),
                )
            )
    columns = (
        "what",
        *(f"{side.name} by {peer.name}" for side, peer in pairs),
        *(side.name for side in results.sides),
        "at least",
        "reached",
    )
    used = [place for place in range(len(columns)) if any(row[place] != NONE for row in rows)]
    return Table(
        title=title,
        columns=tuple(columns[place] for place in used),
        rows=tuple(tuple(row[place] for place in used) for row in rows),
    )


def _shown(ratio: Ratio | None) -> str:
    if ratio is None:
        return NONE
    return f"{ratio.median:.2f}" if ratio.low == ratio.high else str(ratio)


def _with_spread(values: list[float]) -> str:
    if not values:
        return NONE
    middle = show(quantile(values, 0.5))
    if len(values) == 1:
        return middle
    return f"{middle} ({show(min(values))}–{show(max(values))})"


def _at_least(figure: CaseFigure) -> str:
    sign = "≤" if figure.better == "lower" else "≥"
    wanted = [] if figure.limit is None else [f"{sign} {figure.limit:g}"]
    if figure.peer_limit is not None:
        wanted.append(f"≥ {figure.peer_limit:g} × the proxy")
    return ", ".join(wanted) or NONE


def _held(
    results: CaseResults,
    figure: CaseFigure,
    found: dict[str, list[float]],
    ratios: list[Ratio | None],
) -> str:
    """Return by which routers the goal is reached."""
    said = []
    for side in results.sides:
        if side.kind != "router" or not found[side.name]:
            continue
        held = reaches(figure, quantile(found[side.name], 0.5))
        for (whose, peer), ratio in zip(_pairs(results), ratios, strict=True):
            if figure.peer_limit is not None and whose is side and peer.kind == "proxy" and ratio:
                held = held is not False and ratio.median >= figure.peer_limit
        if held is not None:
            said.append((side.name, "yes" if held else "no"))
    if len(said) == 1:
        return said[0][1]
    return ", ".join(f"{name}: {held}" for name, held in said) or NONE


def _measuring_table(results: CaseResults) -> Table:
    rows = []
    for (case, side), tally in results.tallies.items():
        if not tally.wall_s:
            continue
        late = show(quantile(tally.late_s, 0.99) * 1e3) if tally.late_s else NONE
        shares = (tally.measured_s, tally.others_s, tally.load_s, tally.instances_s)
        rows.append(
            (
                f"{case}, {side}",
                *(f"{used / tally.wall_s:.0%}" if used else NONE for used in shares),
                late,
                f"{tally.requests:,}",
                f"{tally.not_right:,}",
            )
        )
    return Table(
        title="The measuring itself",
        columns=(
            "case, side",
            "its core: itself",
            "its core: others",
            "clients",
            "instances",
            "sent late, p99: ms",
            "requests",
            "not right",
        ),
        rows=tuple(rows),
    )


def _notes(results: CaseResults) -> tuple[str, ...]:
    cores = results.cores
    shared = "a core" if len(cores.beside) == 1 else f"{len(cores.beside)} cores"
    named = [f"{name}: {commit}" for name, commit in results.revisions.items() if commit]
    notes = [
        "A column 'x by y' says how many times better x is, turn by turn: the median, with its "
        "quartiles. Sides have the median of their turns, with the least and the most.",
        f"What is measured had one core to itself; instances and clients shared {shared}. CPU time "
        "is that of all processes of what is measured. Wall times hold the contest of instances "
        "and clients for their cores; 'direct', an instance asked without a router, shows it. They "
        "are of no use where others took a good part of the measured core.",
        "The proxy is a stand-in of vLLM's example for disaggregated encoders, on the same "
        "libraries, without its log.",
    ]
    if named:
        notes.append(f"Commits: {'; '.join(named)}.")
    for (case, side), reason in (*results.missing.items(), *results.failed.items()):
        notes.append(f"{case}, {side}: not measured: {' '.join(reason.split())}.")
    for (case, side), tally in results.tallies.items():
        if tally.not_right:
            notes.append(
                f"{case}, {side}: {tally.not_right} of {tally.requests} answers were not right; "
                f"the first: {tally.detail}."
            )
    return tuple(notes)


def _summary(results: CaseResults) -> Plain:
    rows: list[Plain] = []
    for case in results.cases:
        for figure in case.figures:
            found = {side.name: series(results, case, figure, side) for side in results.sides}
            ratios: dict[str, Plain] = {}
            for side, peer in _pairs(results):
                ratio = times_better(figure, found[side.name], found[peer.name])
                if ratio is not None:
                    ratios[f"{side.name} by {peer.name}"] = dataclasses.asdict(ratio)
            sides: dict[str, Plain] = {
                name: {"median": quantile(values, 0.5), "turns": len(values)}
                for name, values in found.items()
                if values
            }
            rows.append(
                {
                    "case": case.name,
                    "figure": figure.key,
                    "what": figure.what,
                    "clock": figure.clock,
                    "limit": figure.limit,
                    "peer_limit": figure.peer_limit,
                    "times_better": ratios,
                    "sides": sides,
                }
            )
    measuring: list[Plain] = [
        {
            "case": case,
            "side": side,
            "wall_s": tally.wall_s,
            "measured_cpu_s": tally.measured_s,
            "load_cpu_s": tally.load_s,
            "instances_cpu_s": tally.instances_s,
            "requests": tally.requests,
            "not_right": tally.not_right,
        }
        for (case, side), tally in results.tallies.items()
    ]
    return {"figures": rows, "measuring": measuring, "revisions": dict(results.revisions)}
