"""Turns the results of `load` into tables and a summary."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from epd_portable.bench.load import figures
from epd_portable.bench.load.measure import LoadResults
from epd_portable.bench.load.plan import PICTURES, LoadPlan, LoadPoint, described
from epd_portable.bench.load.record import SideTurn
from epd_portable.bench.load.search import Findings
from epd_portable.bench.load.sides import LoadSide
from epd_portable.bench.load.stage_report import stage_tables
from epd_portable.bench.report import Plain, Report, Table, conditions
from epd_portable.bench.stats import Ratio, quantile

_COMPARED = (
    ("all", "TPOT", "p99"),
    ("all", "TTFT", "p99"),
    ("text", "TTFT", "p99"),
    ("pictures", "TTFT", "p50"),
    ("pictures", "TTFT", "p99"),
    ("text", "longest ITL", "p50"),
)
"""By which users decide; whichever side they favour."""
_CPU = "CPU time"
_MEASURED = ("epd_portable.delivery.elastic", "epd_portable.runners.background")
"""What decides who encodes a picture, and between which steps."""
_MILLISECONDS = 1000.0
_AS_MEANT = ("encoded", "stored", "local_first", "cancelled")
"""Of `epd_portable.router.observability.record.ItemEnd`: pictures with which nothing went wrong."""
Rounds = dict[LoadPoint, dict[str, list[SideTurn]]]
"""Turns of the rounds that count, by point and side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a page says of a measurement beyond its results.

    Attributes:
        plan: What was measured.
        sides: Whom; the first is compared with the others.
        equal: Who had which cores or devices, and how plain vLLM ran, in words.
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
    if results.found:
        tables = [_search_table(results.found, setting), _rates_table(rounds, setting)]
    elif rounds:
        tables = [
            _ratio_table(rounds, setting),
            _times_table(rounds),
            _goodput_table(rounds, setting),
            _cpu_table(rounds),
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
        conditions=conditions(setting.load_before, measured=_MEASURED),
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


def few_pictures(results: LoadResults, setting: Setting) -> list[str]:
    """Say which points have fewer requests with pictures than figures of them need."""
    found = []
    for point, by_side in good_rounds(results, setting).items():
        count = _with_pictures(next(iter(by_side.values())))
        if 0 < count < PICTURES:
            found.append(f"{point.key}: {count} requests with pictures, fewer than {PICTURES}")
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
        "same round: below 1 the first side is sooner, or takes less; bold is where it loses. "
        "Given is the median of the rounds, with the lowest and the highest.",
        f"{setting.equal} Every side is asked the same requests in the same round, in turns; no "
        "request is asked twice of anybody. "
        + (
            "All sides were up all the time."
            if setting.together
            else "Each side was started for its turns, alone."
        ),
        "TTFT: from the sending to the first token. TPOT: time per token after it. Longest ITL: "
        "how long an answer stood still at worst. All are seen by the clients.",
        "Quantiles of the table of times are those of all rounds together. *Over capacity*: in "
        "most rounds more requests were open in each third of the window than in the one before; "
        "such times would be longer in a longer window.",
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
    notes += [f"{line}: figures of pictures say little." for line in few_pictures(results, setting)]
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


def _table(
    title: str,
    columns: Sequence[str],
    rounds: Rounds,
    cells: Callable[[str, list[SideTurn], dict[str, list[SideTurn]]], Sequence[str]],
) -> Table:
    """Return a table with a row for each side at each point.

    Args:
        title: Of the table.
        columns: After the first.
        rounds: What was measured.
        cells: Returns a row's cells, or none to leave it out; takes the name of the side, its
            turns, and those of all sides at this point.
    """
    rows = []
    for point, by_side in rounds.items():
        for side, turns in by_side.items():
            found = tuple(cells(side, turns, by_side))
            if found:
                rows.append((f"{point.key}: {side}", *found))
    return Table(title=title, columns=("load: side", *columns), rows=tuple(rows))


def _search_table(found: dict[str, dict[str, Findings]], setting: Setting) -> Table:
    plan = setting.plan
    assert plan.search is not None
    rows = []
    first = setting.sides[0].name
    about = {point.key: f"{point.mix.about}" for point in plan.points}
    for key, by_side in found.items():
        own = by_side[first]
        for side, each in by_side.items():
            ratio = "–" if side == first else _times_as_high(own, each)
            met = f"{each.met:g}" if each.met else f"below {plan.search.low:g}"
            missed = "–" if math.isinf(each.missed) else f"{each.missed:g}"
            above = ", ".join(f"{rate:g}" for rate in each.above) or "–"
            rows.append((f"{about[key]}: {side}", ratio, met, missed, above))
    return Table(
        title=f"Highest rate with p99 of {_limits_text(plan)}, and with every lower rate that was "
        "asked",
        columns=(
            "request: side",
            f"{first} by side",
            "met, 1/s",
            "missed, 1/s",
            "met above a missed one, 1/s",
        ),
        rows=tuple(rows),
    )


def _times_as_high(own: Findings, other: Findings) -> str:
    """Return the ratio of two rates; a bound of it where a search ended at its highest rate."""
    if not own.met or not other.met or (math.isinf(own.missed) and math.isinf(other.missed)):
        return "–"
    bound = "≥ " if math.isinf(own.missed) else "≤ " if math.isinf(other.missed) else ""
    return f"{bound}{own.met / other.met:.2f}"


def _rates_table(rounds: Rounds, setting: Setting) -> Table:
    limits = setting.plan.limits

    def cells(side: str, turns: list[SideTurn], by_side: object) -> Sequence[str]:
        ttft_s, tpot_s = figures.p99s(turns)
        return (
            "met" if figures.meets(turns, limits) else "missed",
            f"{ttft_s * _MILLISECONDS:.0f}",
            f"{tpot_s * _MILLISECONDS:.1f}",
            str(len(turns)),
            _counts(turns),
        )

    return _table(
        "Every rate that was asked; p99 of all rounds together, failures as infinite",
        ("limits", "p99 TTFT, ms", "p99 TPOT, ms", "rounds", "requests, with pictures"),
        rounds,
        cells,
    )


def _with_pictures(turns: Sequence[SideTurn]) -> int:
    return len(figures.of_kind(turns, "pictures"))


def _counts(turns: Sequence[SideTurn]) -> str:
    return f"{len(figures.of_kind(turns, 'all'))}, {_with_pictures(turns)}"


def _kinds(turns: Sequence[SideTurn]) -> list[str]:
    """Return the kinds that a point has; all, if there is more than one."""
    found = {each.kind for turn in turns for each in turn.requests}
    return [kind for kind in figures.KINDS if kind in found or (kind == "all" and len(found) > 1)]


def _statistic(turn: SideTurn, *, kind: str, quantity: str, name: str) -> float | None:
    return figures.statistic([turn], kind, quantity, name)


def _ratios(turns: Sequence[SideTurn], peers: Sequence[SideTurn]) -> dict[str, Ratio | None]:
    """Return what is compared of two sides, by its name in tables."""
    found = {
        f"{quantity} {name} of {kind}": figures.ratio(
            turns, peers, partial(_statistic, kind=kind, quantity=quantity, name=name)
        )
        for kind, quantity, name in _COMPARED
    }
    return {**found, _CPU: figures.ratio(turns, peers, figures.cpu_s_per_request)}


def _shown(ratio: Ratio | None) -> str:
    """Return a ratio as tables show it, bold where the first side loses."""
    if ratio is None:
        return "–"
    median, _, spread = str(ratio).partition(" ")
    return f"**{median}** {spread}" if float(median) > 1 else f"{median} {spread}"


def _ratio_table(rounds: Rounds, setting: Setting) -> Table:
    first, *others = (side.name for side in setting.sides)
    rows = []
    for point, by_side in rounds.items():
        crowded = [side for side, turns in by_side.items() if figures.over_capacity(turns)]
        for other in others:
            over = ", ".join(side for side in (first, other) if side in crowded)
            rows.append(
                (
                    point.key,
                    other,
                    *map(_shown, _ratios(by_side[first], by_side[other]).values()),
                    str(len(by_side[first])),
                    _counts(by_side[first]),
                    over or "–",
                )
            )
    return Table(
        title=f"{first} by the other sides",
        columns=(
            "load",
            "by",
            *(f"{quantity} {name}, {kind}" for kind, quantity, name in _COMPARED),
            _CPU,
            "rounds",
            "requests, with pictures",
            "over capacity",
        ),
        rows=tuple(rows),
    )


def _times_table(rounds: Rounds) -> Table:
    rows = []
    for point, by_side in rounds.items():
        for side, turns in by_side.items():
            over = ", over capacity" if figures.over_capacity(turns) else ""
            for kind in _kinds(turns):
                cells = []
                for quantity in figures.QUANTITIES:
                    digits = 0 if quantity in ("TTFT", "E2E") else 1
                    found = [
                        figures.statistic(turns, kind, quantity, name)
                        for name in figures.STATISTICS
                    ]
                    cells.append(
                        " / ".join(
                            "–" if value is None else f"{value * _MILLISECONDS:.{digits}f}"
                            for value in found
                        )
                    )
                count = len(figures.of_kind(turns, kind))
                rows.append((f"{point.key}: {side}{over}: {kind}", *cells, str(count)))
    return Table(
        title=f"Times in ms: {' / '.join(figures.STATISTICS)}",
        columns=("load: side: requests", *figures.QUANTITIES, "requests"),
        rows=tuple(rows),
    )


def _goodput_table(rounds: Rounds, setting: Setting) -> Table:
    limits = setting.plan.limits
    first = setting.sides[0].name

    def cells(
        side: str, turns: list[SideTurn], by_side: dict[str, list[SideTurn]]
    ) -> Sequence[str]:
        def goodput(turn: SideTurn) -> float:
            return figures.goodput(turn, limits)

        ratio = None if side == first else figures.ratio(by_side[first], turns, goodput)
        return (
            "–" if ratio is None else str(ratio),
            f"{_median(turns, goodput):.2f}",
            f"{_median(turns, figures.throughput):.1f}",
            str(figures.failures(turns)),
        )

    return _table(
        "Goodput and throughput, medians of the rounds; and failures",
        (f"goodput, {first} by side", "goodput, requests/s", "output tokens/s", "failed"),
        rounds,
        cells,
    )


def _median(turns: Sequence[SideTurn], figure: Callable[[SideTurn], float]) -> float:
    return quantile([figure(turn) for turn in turns], 0.5)


def _cpu_table(rounds: Rounds) -> Table:
    def cells(side: str, turns: list[SideTurn], by_side: object) -> Sequence[str]:
        used: Counter[str] = Counter()
        count = sum(len(turn.requests) for turn in turns)
        for turn in turns:
            for part, roles in turn.cpu_s.items():
                for role, seconds in roles.items():
                    used[part if role == part else f"{part} {role}"] += seconds  # type: ignore[assignment]
        whole = sum(used.values())
        shown = [
            f"{name} {seconds / count * _MILLISECONDS:.0f}"
            for name, seconds in used.items()
            if seconds >= 0.005 * whole
        ]
        if not whole:
            return ()
        return f"{whole:.1f}", f"{whole / count * _MILLISECONDS:.0f}", ", ".join(shown)

    columns = ("s in all", "ms per request", "by process, ms per request")
    return _table("CPU time", columns, rounds, cells)


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
    def cells(side: str, turns: list[SideTurn], by_side: object) -> Sequence[str]:
        found: dict[str, float] = {}
        for turn in turns:
            counts = {
                **turn.counted.outcomes,
                **{f"fallback {name}": count for name, count in turn.counted.ladder.items()},
                **({"fell back": turn.counted.fallbacks} if turn.counted.fallbacks else {}),
            }
            for name, count in counts.items():
                found[name] = found.get(name, 0) + count
        return (
            [", ".join(f"{name} {count:g}" for name, count in sorted(found.items()))]
            if found
            else ()
        )

    title = "What became of the pictures, as the router counts them"
    return _table(title, ("items",), rounds, cells)


def _caches_table(rounds: Rounds) -> Table:
    """What caches saved: pictures that were not encoded again, text that was not computed again."""

    def cells(side: str, turns: list[SideTurn], by_side: object) -> Sequence[str]:
        asked = sum(each.pictures for turn in turns for each in turn.requests)
        encoded: dict[str, float] = {}
        for turn in turns:
            for source, count in turn.counted.encoded.items():
                encoded[source] = encoded.get(source, 0.0) + count
        queries = sum(turn.counted.prefix_queries for turn in turns)
        hits = sum(turn.counted.prefix_hits for turn in turns)
        runs = encoded.get("encoder", 0.0) + encoded.get("local", 0.0)
        return (
            str(asked) if asked else "–",
            str(sum(turn.distinct_pictures for turn in turns)) if encoded else "–",
            f"{runs:g}" if encoded else "–",
            f"{queries:g}" if queries else "–",
            f"{hits / queries:.1%}" if queries else "–",
        )

    return _table(
        "What caches saved: encoder runs, and prompt tokens in engines' prefix caches",
        (
            "pictures",
            "of these different in their round",
            "encoder runs",
            "prompt tokens",
            "found in a prefix cache",
        ),
        rounds,
        cells,
    )


def _clients_table(rounds: Rounds) -> Table:
    def cells(side: str, turns: list[SideTurn], by_side: object) -> Sequence[str]:
        late_s = [each.late_s for turn in turns for each in turn.requests]
        share = sum(turn.client_cpu_s for turn in turns) / sum(turn.wall_s for turn in turns)
        texts = figures.of_kind(turns, "text")
        prompt = [each.prompt_tokens for each in texts if not each.problem]
        return (
            f"{quantile(late_s, 0.5) * _MILLISECONDS:.1f} / "
            f"{quantile(late_s, 0.99) * _MILLISECONDS:.1f}",
            f"{share:.0%}",
            f"{quantile(prompt, 0.5):.0f}" if prompt else "–",
        )

    return _table(
        "The measuring itself",
        ("sent late, p50 / p99, ms", "clients, share of a core", "prompt tokens of a text, p50"),
        rounds,
        cells,
    )


def _summary(results: LoadResults, rounds: Rounds, setting: Setting) -> Plain:
    first, *others = (side.name for side in setting.sides)
    points: dict[str, Any] = {}
    for point, by_side in rounds.items():
        points[point.key] = {
            "sides": {
                side: {
                    "goodput": _median(
                        turns, lambda turn: figures.goodput(turn, setting.plan.limits)
                    ),
                    "throughput": _median(turns, figures.throughput),
                    "failed": figures.failures(turns),
                    "requests": len(figures.of_kind(turns, "all")),
                    "with_pictures": _with_pictures(turns),
                    "over_capacity": figures.over_capacity(turns),
                    "cpu_s_per_request": _median(turns, figures.cpu_s_per_request),
                    "times_s": {
                        kind: {
                            f"{quantity} {name}": figures.statistic(turns, kind, quantity, name)
                            for quantity in figures.QUANTITIES
                            for name in figures.STATISTICS
                        }
                        for kind in _kinds(turns)
                    },
                }
                for side, turns in by_side.items()
            },
            "ratios": {
                other: {
                    what: None if ratio is None else dataclasses.asdict(ratio)
                    for what, ratio in _ratios(by_side[first], by_side[other]).items()
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
                    "met": each.met or None,
                    "missed": None if math.isinf(each.missed) else each.missed,
                    "met_above": each.above,
                }
                for side, each in by_side.items()
            }
            for key, by_side in results.found.items()
        },
        "refused": results.refused(),
    }


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
