"""Turns the results of `load` into tables and a summary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from epd_portable.bench.load import figures
from epd_portable.bench.load.measure import LoadResults
from epd_portable.bench.load.plan import LoadPlan, LoadPoint, described
from epd_portable.bench.load.record import SideTurn
from epd_portable.bench.load.search import Bracket
from epd_portable.bench.load.sides import LoadSide
from epd_portable.bench.load.stage_report import stage_tables
from epd_portable.bench.report import Plain, Report, Table, conditions
from epd_portable.bench.stats import Ratio, quantile

_RATIOS = (
    ("TTFT", "p50"),
    ("TTFT", "p99"),
    ("TPOT", "p50"),
    ("TPOT", "p99"),
    ("longest ITL", "p50"),
    ("E2E", "p50"),
    ("E2E", "p99"),
)
_MILLISECONDS = 1000.0
_AS_MEANT = ("encoded", "stored", "sooner_here", "cancelled")
"""Of `epd_portable.router.observability.record.ItemEnd`: pictures with which nothing went wrong."""
Rounds = dict[LoadPoint, dict[str, list[SideTurn]]]
"""Turns of the rounds that count, by point and side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a page says of a measurement beyond its results.

    Attributes:
        plan: What was measured.
        sides: Whom; the first is compared with the others.
        equal: Who had which cores or devices, in words.
        together: All sides were up all the time.
        facts: What decides the requests, for the summary.
        fingerprint: Of the requests, sides and settings.
        command: The command line.
        load_before: Load average before.
    """

    plan: LoadPlan
    sides: tuple[LoadSide, ...]
    equal: str
    together: bool
    facts: dict[str, Any]
    fingerprint: str
    command: str
    load_before: float


def make_report(results: LoadResults, setting: Setting) -> Report:
    """Return the report of what is there so far."""
    rounds = good_rounds(results, setting)
    tables = []
    if results.brackets:
        tables.append(_search_table(results.brackets, setting))
    if rounds:
        tables += [_ratio_table(rounds, setting)] if len(setting.sides) > 1 else []
        tables += [
            _goodput_table(rounds, setting),
            *_time_tables(rounds, setting),
            _cpu_table(rounds, setting),
            _memory_table(rounds),
            _startup_table(results, setting),
            _outcomes_table(rounds),
            _caches_table(rounds),
            *stage_tables(rounds),
            _clients_table(rounds),
        ]
    return Report(
        title="A topology under load" if len(setting.sides) == 1 else _title(setting),
        command=setting.command,
        conditions=conditions(setting.load_before),
        notes=_notes(results, setting),
        tables=tuple(table for table in tables if table.rows),
        summary=_summary(results, rounds, setting),
        samples=[msgspec.to_builtins(turn) for turn in results.turns],
    )


def measured_points(results: LoadResults, setting: Setting) -> list[LoadPoint]:
    """Return the points of the plan, or those at which a search has looked, by rising rate."""
    plan = setting.plan
    if plan.search is None:
        return list(plan.points)
    return [
        dataclasses.replace(sought, rate=rate)
        for sought in plan.points
        for rate in _rates(results, sought)
    ]


def good_rounds(results: LoadResults, setting: Setting) -> Rounds:
    """Return the turns that count, by point and side."""
    found: Rounds = {}
    for point in measured_points(results, setting):
        good = results.good(point)
        if good:
            found[point] = {
                side.name: [
                    next(turn for turn in turns if turn.side == side.name) for turns in good
                ]
                for side in setting.sides
            }
    return found


def _rates(results: LoadResults, sought: LoadPoint) -> list[float]:
    """Return the rates at which a sought point was measured, rising."""
    rest = dataclasses.replace(sought, rate=1.0).key.partition("/s")[2]
    found = set()
    for turn in results.turns:
        rate, _, after = turn.point.partition("/s")
        if after == rest:
            found.add(float(rate))
    return sorted(found)


def _title(setting: Setting) -> str:
    first, *others = (f"{side.name} ({side.what})" for side in setting.sides)
    return f"Under load: {first} beside {', '.join(others)}"


def _notes(results: LoadResults, setting: Setting) -> tuple[str, ...]:
    plan = setting.plan
    notes = [
        "Ratios are the first side by another, each figure of a round by the same figure of the "
        "same round: below 1 the first side is sooner. Given is the median of the rounds with "
        "their quartiles, which show the noise.",
        f"{setting.equal} Every side is asked the same requests in the same round, in turns; no "
        "request is asked twice of anybody. "
        + (
            "All sides were up all the time."
            if setting.together
            else "Each side was started for its turns, alone."
        ),
        "TTFT: from the sending to the first token. TPOT: time per token after it. ITL: between "
        "two pieces of an answer. All are seen by the clients.",
        "Quantiles of the tables of times are those of all rounds together.",
    ]
    if plan.limits.ttft_s < math.inf or plan.limits.tpot_s < math.inf:
        notes.append(f"Goodput counts answers with {_limits_text(plan)}: each answer by itself.")
    if not results.tokens_known:
        notes.append("No side tells how many tokens a text has: a word is taken for a token.")
    for side in setting.sides:
        turns = [turn for turn in results.turns if turn.side == side.name]
        problems = [each.problem for each in figures.of_kind(turns, "all") if each.problem]
        if problems:
            notes.append(
                f"{len(problems)} requests of {side.name} failed; the first: {problems[0]}"
            )
    refused = results.refused()
    if refused:
        notes.append(f"Rounds that do not count: {'; '.join(refused)}")
    return tuple(notes)


def _limits_text(plan: LoadPlan) -> str:
    parts = [
        f"{name} ≤ {value_s * _MILLISECONDS:g} ms"
        for name, value_s in (("TTFT", plan.limits.ttft_s), ("TPOT", plan.limits.tpot_s))
        if value_s < math.inf
    ]
    return " and ".join(parts)


def _search_table(brackets: dict[str, dict[str, Bracket]], setting: Setting) -> Table:
    plan = setting.plan
    assert plan.search is not None
    rows = []
    first = setting.sides[0].name
    about = {point.key: f"{point.mix.about}" for point in plan.points}
    for key, by_side in brackets.items():
        own = by_side[first]
        for side, bracket in by_side.items():
            ratio = "–" if side == first else _times_as_high(own, bracket)
            met = f"{bracket.met:g}" if bracket.met else f"below {plan.search.low:g}"
            missed = "–" if math.isinf(bracket.missed) else f"{bracket.missed:g}"
            rows.append((f"{about[key]}: {side}", ratio, met, missed))
    return Table(
        title=f"Highest rate with p{plan.search.quantile * 100:g} of {_limits_text(plan)}",
        columns=("request: side", f"{first} by side", "met, 1/s", "missed, 1/s"),
        rows=tuple(rows),
    )


def _times_as_high(own: Bracket, other: Bracket) -> str:
    """Return the ratio of two rates; a bound of it where a search ended at its highest rate."""
    if not own.met or not other.met or (math.isinf(own.missed) and math.isinf(other.missed)):
        return "–"
    bound = "≥ " if math.isinf(own.missed) else "≤ " if math.isinf(other.missed) else ""
    return f"{bound}{own.met / other.met:.2f}"


def _kinds(turns: Sequence[SideTurn]) -> list[str]:
    """Return the kinds that a point has; all, if there is more than one."""
    found = {each.kind for turn in turns for each in turn.requests}
    return [kind for kind in figures.KINDS if kind in found or (kind == "all" and len(found) > 1)]


def _ratio(turns: Sequence[SideTurn], peers: Sequence[SideTurn], **what: str) -> Ratio | None:
    def figure(turn: SideTurn) -> float | None:
        return figures.statistic([turn], what["kind"], what["quantity"], what["name"])

    found = figures.ratios(turns, peers, figure)
    return _spread(found)


def _spread(found: Sequence[float]) -> Ratio | None:
    if not found:
        return None
    return Ratio(median=quantile(found, 0.5), low=quantile(found, 0.25), high=quantile(found, 0.75))


def _shown(ratio: Ratio | None) -> str:
    return "–" if ratio is None else str(ratio)


def _ratio_table(rounds: Rounds, setting: Setting) -> Table:
    first, *others = (side.name for side in setting.sides)
    rows = []
    for point, by_side in rounds.items():
        for other in others:
            for kind in _kinds(by_side[first]):
                cells = [
                    _shown(
                        _ratio(
                            by_side[first],
                            by_side[other],
                            kind=kind,
                            quantity=quantity,
                            name=name,
                        )
                    )
                    for quantity, name in _RATIOS
                ]
                rows.append((f"{point.key}: {kind}", other, *cells, str(len(by_side[first]))))
    return Table(
        title=f"{first} by the other sides",
        columns=(
            "load: requests",
            "by",
            *(f"{quantity} {name}" for quantity, name in _RATIOS),
            "rounds",
        ),
        rows=tuple(rows),
    )


def _goodput_table(rounds: Rounds, setting: Setting) -> Table:
    limits = setting.plan.limits
    first = setting.sides[0].name
    rows = []
    for point, by_side in rounds.items():
        for side, turns in by_side.items():
            ratio = None
            if side != first:
                ratio = _spread(
                    figures.ratios(
                        by_side[first], turns, lambda turn: figures.goodput(turn, limits)
                    )
                )
            rows.append(
                (
                    f"{point.key}: {side}",
                    _shown(ratio),
                    f"{_median(turns, lambda turn: figures.goodput(turn, limits)):.2f}",
                    f"{_median(turns, figures.throughput):.1f}",
                    str(sum(len(turn.requests) for turn in turns)),
                    str(figures.failures(turns)),
                )
            )
    return Table(
        title="Goodput, throughput and failures; medians of the rounds, sums of requests",
        columns=(
            "load: side",
            f"goodput, {first} by side",
            "goodput, requests/s",
            "output tokens/s",
            "requests",
            "failed",
        ),
        rows=tuple(rows),
    )


def _median(turns: Sequence[SideTurn], figure: Callable[[SideTurn], float]) -> float:
    return quantile([figure(turn) for turn in turns], 0.5)


def _time_tables(rounds: Rounds, setting: Setting) -> list[Table]:
    """Return a table of times for each kind of requests."""
    tables = []
    names = tuple(figures.STATISTICS)
    for kind in figures.KINDS:
        rows = []
        for point, by_side in rounds.items():
            for side, turns in by_side.items():
                if kind not in _kinds(turns):
                    continue
                cells = []
                for quantity in figures.QUANTITIES:
                    digits = 0 if quantity in ("TTFT", "E2E") else 1
                    found = [figures.statistic(turns, kind, quantity, name) for name in names]
                    cells.append(
                        " / ".join(
                            "–" if value is None else f"{value * _MILLISECONDS:.{digits}f}"
                            for value in found
                        )
                    )
                rows.append((f"{point.key}: {side}", *cells))
        tables.append(
            Table(
                title=f"Times of {kind} requests, in ms: {' / '.join(names)}",
                columns=("load: side", *figures.QUANTITIES),
                rows=tuple(rows),
            )
        )
    return tables


def _cpu_table(rounds: Rounds, setting: Setting) -> Table:
    rows = []
    for point, by_side in rounds.items():
        for side, turns in by_side.items():
            used: dict[str, float] = {}
            count = sum(len(turn.requests) for turn in turns)
            for turn in turns:
                for part, roles in turn.cpu_s.items():
                    for role, seconds in roles.items():
                        name = part if role == part else f"{part} {role}"
                        used[name] = used.get(name, 0.0) + seconds
            if not used:
                continue
            whole = sum(used.values())
            shown = [
                f"{name} {seconds / count * 1000:.0f}"
                for name, seconds in used.items()
                if seconds / whole >= 0.005
            ]
            rows.append(
                (
                    f"{point.key}: {side}",
                    f"{whole:.1f}",
                    f"{whole / count * 1000:.0f}",
                    ", ".join(shown),
                )
            )
    return Table(
        title="CPU time",
        columns=("load: side", "s in all", "ms per request", "by process, ms per request"),
        rows=tuple(rows),
    )


def _memory_table(rounds: Rounds) -> Table:
    last: dict[tuple[str, str], tuple[int, int]] = {}
    for by_side in rounds.values():
        for side, turns in by_side.items():
            for turn in turns:
                for part, used in turn.memory.items():
                    rss, pss = last.get((side, part), (0, 0))
                    last[side, part] = max(rss, used.rss_bytes), max(pss, used.pss_bytes)
    return Table(
        title="Memory after a turn, at most, in MiB",
        columns=("side: part", "RSS", "PSS"),
        rows=tuple(
            (f"{side}: {part}", f"{rss / 2**20:.0f}", f"{pss / 2**20:.0f}")
            for (side, part), (rss, pss) in last.items()
        ),
    )


def _startup_table(results: LoadResults, setting: Setting) -> Table:
    first = results.startup_s.get(setting.sides[0].name)
    return Table(
        title="Start-up, once, all sides that are up together at the same time",
        columns=("side", f"{setting.sides[0].name} by side", "s"),
        rows=tuple(
            (side, f"{first / value:.2f}" if first else "–", f"{value:.0f}")
            for side, value in results.startup_s.items()
            if value
        ),
    )


def _outcomes_table(rounds: Rounds) -> Table:
    rows = []
    for point, by_side in rounds.items():
        for side, turns in by_side.items():
            found: dict[str, float] = {}
            for turn in turns:
                for name, count in turn.counted.outcomes.items():
                    found[name] = found.get(name, 0) + count
                for name, count in turn.counted.ladder.items():
                    found[f"rung {name}"] = found.get(f"rung {name}", 0) + count
                if turn.counted.fallbacks:
                    found["fell back"] = found.get("fell back", 0) + turn.counted.fallbacks
            if found:
                shown = ", ".join(f"{name} {count:g}" for name, count in found.items())
                rows.append((f"{point.key}: {side}", shown))
    return Table(
        title="What became of the pictures, as the router counts them",
        columns=("load: side", "items"),
        rows=tuple(rows),
    )


def _caches_table(rounds: Rounds) -> Table:
    """What caches saved: pictures that were not encoded again, text that was not computed again."""
    rows = []
    for point, by_side in rounds.items():
        for side, turns in by_side.items():
            asked = sum(each.pictures for turn in turns for each in turn.requests)
            encoded: dict[str, float] = {}
            for turn in turns:
                for source, count in turn.counted.encoded.items():
                    encoded[source] = encoded.get(source, 0.0) + count
            queries = sum(turn.counted.prefix_queries for turn in turns)
            hits = sum(turn.counted.prefix_hits for turn in turns)
            rows.append(
                (
                    f"{point.key}: {side}",
                    *(
                        (
                            str(asked),
                            str(sum(turn.distinct_pictures for turn in turns)),
                            f"{encoded.get('encoder', 0.0) + encoded.get('local', 0.0):g}",
                        )
                        if encoded
                        else (str(asked) if asked else "–", "–", "–")
                    ),
                    f"{queries:g}" if queries else "–",
                    f"{hits / queries:.1%}" if queries else "–",
                )
            )
    return Table(
        title="What caches saved: encoder runs, and prompt tokens in engines' prefix caches",
        columns=(
            "load: side",
            "pictures",
            "of these different in their round",
            "encoder runs",
            "prompt tokens",
            "found in a prefix cache",
        ),
        rows=tuple(rows),
    )


def _clients_table(rounds: Rounds) -> Table:
    rows = []
    for point, by_side in rounds.items():
        for side, turns in by_side.items():
            late_s = [each.late_s for turn in turns for each in turn.requests]
            share = sum(turn.client_cpu_s for turn in turns) / sum(turn.wall_s for turn in turns)
            prompt = [
                each.prompt_tokens
                for turn in turns
                for each in turn.requests
                if each.kind == "text" and not each.problem
            ]
            rows.append(
                (
                    f"{point.key}: {side}",
                    f"{quantile(late_s, 0.5) * 1000:.1f} / {quantile(late_s, 0.99) * 1000:.1f}",
                    f"{share:.0%}",
                    f"{quantile(prompt, 0.5):.0f}" if prompt else "–",
                )
            )
    return Table(
        title="The measuring itself",
        columns=(
            "load: side",
            "sent late, p50 / p99, ms",
            "clients, share of a core",
            "prompt tokens of a text, p50",
        ),
        rows=tuple(rows),
    )


def _summary(results: LoadResults, rounds: Rounds, setting: Setting) -> Plain:
    first, *others = (side.name for side in setting.sides)
    points: dict[str, Any] = {}
    for point, by_side in rounds.items():
        kinds = _kinds(by_side[first])
        points[point.key] = {
            "sides": {
                side: {
                    "goodput": _median(
                        turns, lambda turn: figures.goodput(turn, setting.plan.limits)
                    ),
                    "throughput": _median(turns, figures.throughput),
                    "failed": figures.failures(turns),
                    "requests": sum(len(turn.requests) for turn in turns),
                    "cpu_s_per_request": sum(turn.whole_cpu_s for turn in turns)
                    / sum(len(turn.requests) for turn in turns),
                    "times_s": {
                        kind: {
                            quantity: {
                                name: figures.statistic(turns, kind, quantity, name)
                                for name in figures.STATISTICS
                            }
                            for quantity in figures.QUANTITIES
                        }
                        for kind in kinds
                    },
                }
                for side, turns in by_side.items()
            },
            "ratios": {
                other: {
                    kind: {
                        f"{quantity} {name}": _plain_ratio(
                            _ratio(
                                by_side[first],
                                by_side[other],
                                kind=kind,
                                quantity=quantity,
                                name=name,
                            )
                        )
                        for quantity in figures.QUANTITIES
                        for name in figures.STATISTICS
                    }
                    for kind in kinds
                }
                for other in others
            },
        }
    return {
        "fingerprint": setting.fingerprint,
        "words_per_token": results.words_per_token,
        "facts": setting.facts,
        "plan": described(setting.plan),
        "startup_s": dict(results.startup_s),
        "points": points,
        "search": {
            key: {
                side: {
                    "met": bracket.met or None,
                    "missed": None if math.isinf(bracket.missed) else bracket.missed,
                }
                for side, bracket in by_side.items()
            }
            for key, by_side in results.brackets.items()
        },
        "refused": results.refused(),
    }


def _plain_ratio(ratio: Ratio | None) -> dict[str, float] | None:
    return None if ratio is None else dataclasses.asdict(ratio)


def total_failure(results: LoadResults, side: str) -> str:
    """Return the first problem of a side that answered nothing at all; empty if it did."""
    requests = figures.of_kind([turn for turn in results.turns if turn.side == side], "all")
    failed = [each.problem for each in requests if each.problem]
    return failed[0] if failed and len(failed) == len(requests) else ""


def fell_back(results: LoadResults, setting: Setting) -> str:
    """Say which pictures of which side took another way than they should; empty if none did."""
    found = []
    for side in setting.sides:
        turns = [turn for turn in results.turns if turn.side == side.name and not turn.refused]
        lost = sum(
            count
            for turn in turns
            for outcome, count in turn.counted.outcomes.items()
            if outcome not in _AS_MEANT
        )
        fallbacks = sum(turn.counted.fallbacks for turn in turns)
        failed = sum(turn.traced.provenance.failed for turn in turns if turn.traced is not None)
        if lost or fallbacks or failed:
            found.append(
                f"{side.name}: {lost:g} pictures were not encoded by the encoder that was asked "
                f"first, {fallbacks:g} not transferred although that was expected, "
                f"{failed} transfers failed"
            )
    return "; ".join(found)
