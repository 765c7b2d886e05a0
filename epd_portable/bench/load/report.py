"""Turns the results of `load` into tables and samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from epd_portable.bench.load.measure import LoadResults, Rounds
from epd_portable.bench.load.setting import LoadSetting
from epd_portable.bench.load.turns import KINDS, QUANTITIES, Turn, ratio
from epd_portable.bench.report import Report, Row, conditions
from epd_portable.bench.stats import Ratio, quantile

_COMPARED = (
    ("all", "TPOT", "p99"),
    ("all", "TTFT", "p99"),
    ("text", "TTFT", "p99"),
    ("pictures", "TTFT", "p50"),
    ("pictures", "TTFT", "p99"),
    ("pictures", "E2E", "p50"),
    ("text", "longest ITL", "p50"),
)
"""By which users decide; whichever side they favour."""
_MEASURED = ("epd_portable.placement.assignment", "epd_portable.runners.background")
"""What decides who encodes a picture, and between which steps."""
_AS_MEANT = ("encoded", "stored", "local_first", "cancelled")
"""Ends of items, as the router counts them, with which nothing went wrong."""
_NONE = "–"
_FEW_PICTURES = 30
"""Figures of fewer requests with pictures say little."""


def make_report(results: LoadResults, setting: LoadSetting) -> Report:
    """Return the report of what is there so far."""
    plan, rounds = setting.plan, results.good_rounds()
    first, *others = (side.name for side in setting.sides)
    tables = {
        f"{first} by the other sides": _ratios(rounds, first, others),
        "Times in ms, medians of the rounds: p50 / p90 / p99": _times(rounds),
        "As vllm bench serve says it, medians of the rounds": _serving(rounds),
        "CPU time, and memory after a turn": _usage(rounds),
        "What became of the pictures, as the router counts them, and what caches saved": _pictures(
            rounds
        ),
    }
    sides = ", ".join(f"{side.name} ({side.what})" for side in setting.sides)
    return Report(
        title=f"Under load: {sides}",
        conditions=conditions(_MEASURED),
        notes=_notes(results, rounds, setting),
        tables={title: rows for title, found in tables.items() if (rows := list(found))},
        summary={
            "sides": {side.name: side.what for side in setting.sides},
            "points": [point.key for point in plan.points],
            "words_per_token": results.words_per_token,
            "platform": setting.platform,
        },
        samples=[msgspec.to_builtins(turn) for turn in results.turns],
    )


def find_fallbacks(results: LoadResults, setting: LoadSetting) -> str:
    """Return which pictures of which side took another way than they should; empty if none did."""
    found = []
    for side in setting.sides:
        counted = _counted(
            [turn for turn in results.turns if turn.side == side.name and not turn.refused]
        )
        ends = _named(counted, "items")
        lost = sum(count for end, count in ends.items() if end not in _AS_MEANT)
        if lost or counted["untransferred"]:
            found.append(
                f"{side.name}: {lost:g} pictures were not encoded by the encoder that was asked "
                f"first, {counted['untransferred']:g} not transferred although that was expected"
            )
    return "; ".join(found)


def _notes(results: LoadResults, rounds: Rounds, setting: LoadSetting) -> tuple[str, ...]:
    notes = [
        "Ratios are the first side by another, each figure of a round by the same figure of the "
        "same round: below 1 the first side is sooner, or takes less; bold is where it loses. "
        "Given is the median of the rounds, with the lowest and the highest.",
        f"{setting.allotment} Every side is asked the same "
        "requests in the same round, in turns; no request is asked twice. A side that is started "
        "here is up for its turns, alone.",
        "TTFT: from the sending to the first token. TPOT: time per token after it. Longest ITL: "
        "how long an answer stood still at worst. All are seen by the clients.",
        "Times are medians of the rounds' quantiles. Above what a side can serve they grow with "
        "the window.",
    ]
    for side in setting.sides:
        turns = [turn for turn in results.turns if turn.side == side.name and turn.failed]
        if failed := sum(turn.failed for turn in turns):
            notes.append(f"{failed} requests of {side.name} failed; the first: {turns[0].problem}")
    for point, by_side in rounds.items():
        count = _count(next(iter(by_side.values())), "pictures")
        if 0 < count < _FEW_PICTURES:
            notes.append(
                f"{point}: {count} requests with pictures, fewer than {_FEW_PICTURES}: figures of "
                "pictures say little; give more --rounds or --seconds."
            )
    if refused := results.refused():
        notes.append(
            f"{len(refused)} turns were refused; their rounds do not count: {'; '.join(refused)}"
        )
    return tuple(notes)


def _each(rounds: Rounds) -> Iterator[tuple[str, list[Turn]]]:
    """Yield the turns of each side at each point, and what tables call them."""
    for point, by_side in rounds.items():
        for side, turns in by_side.items():
            yield f"{point}: {side}", turns


def _count(turns: Sequence[Turn], kind: str) -> int:
    return sum(turn.count if kind == "all" else turn.requests.get(kind, 0) for turn in turns)


def _counted(turns: Sequence[Turn]) -> Counter[str]:
    found: Counter[str] = Counter()
    for turn in turns:
        found.update(turn.counted)
    return found


def _named(counted: Counter[str], name: str) -> dict[str, float]:
    """Return counts whose names begin with a word, by the rest."""
    words = ((key.partition(" "), count) for key, count in sorted(counted.items()))
    return {rest: count for (first, _, rest), count in words if first == name}


def _median(turns: Sequence[Turn], figure: Callable[[Turn], float | None]) -> float | None:
    found = [value for value in map(figure, turns) if value is not None]
    return quantile(found, 0.5) if found else None


def _ratios(rounds: Rounds, first: str, others: Sequence[str]) -> Iterator[Row]:
    compared: dict[str, Callable[[Turn], float | None]] = {
        f"{quantity} {name}, {kind}": partial(
            Turn.quantile, kind=kind, quantity=quantity, name=name
        )
        for kind, quantity, name in _COMPARED
    }
    compared["CPU time"] = lambda turn: turn.cpu_s_per_request
    for point, by_side in rounds.items():
        own = by_side[first]
        for other in others:
            yield {
                "load": point,
                "by": other,
                **{
                    what: _shown(ratio(own, by_side[other], figure))
                    for what, figure in compared.items()
                },
                "rounds": str(len(own)),
                "requests, with pictures": f"{_count(own, 'all')}, {_count(own, 'pictures')}",
            }


def _shown(found: Ratio | None) -> str:
    """Return a ratio as tables show it, bold where the first side loses."""
    if found is None:
        return _NONE
    median, _, spread = str(found).partition(" ")
    return f"**{median}** {spread}" if float(median) > 1 else f"{median} {spread}"


def _times(rounds: Rounds) -> Iterator[Row]:
    for name, turns in _each(rounds):
        for kind in KINDS:
            if kind != "all" and _count(turns, kind) in (0, _count(turns, "all")):
                continue
            row = {"load: side: requests": f"{name}: {kind}"}
            for quantity in QUANTITIES:
                pick = partial(Turn.quantile, kind=kind, quantity=quantity)
                digits = 0 if quantity in ("TTFT", "E2E") else 1
                found = [_median(turns, partial(pick, name=q)) for q in ("p50", "p90", "p99")]
                row[quantity] = " / ".join(_milliseconds(each, digits) for each in found)
            longest = [turn.quantile(kind, "longest ITL", "max") or 0.0 for turn in turns]
            row["longest ITL of all"] = _milliseconds(max(longest), 0)
            yield row | {"requests": str(_count(turns, kind))}


def _milliseconds(value_s: float | None, digits: int) -> str:
    return _NONE if value_s is None else f"{value_s * 1000:.{digits}f}"


def _serving(rounds: Rounds) -> Iterator[Row]:
    for name, turns in _each(rounds):
        figures = {
            figure: f"{quantile([turn.serving[figure] for turn in turns], 0.5):.2f}"
            for figure in turns[0].serving
        }
        asked = sum(turn.count for turn in turns)
        answered = asked - sum(turn.failed for turn in turns)
        yield {"load: side": name, "answered of asked": f"{answered} of {asked}", **figures}


def _usage(rounds: Rounds) -> Iterator[Row]:
    for name, turns in _each(rounds):
        used_s: Counter[str] = Counter()
        memory: Counter[str] = Counter()
        for turn in turns:
            used_s.update(turn.cpu_s)
            memory |= Counter(turn.memory_bytes)
        whole_s, count = sum(used_s.values()), _count(turns, "all")
        wall_s = sum(turn.wall_s for turn in turns)
        shares = (
            f"{process} {seconds / count * 1000:.0f} ({seconds / wall_s:.2f})"
            for process, seconds in used_s.items()
            if seconds >= 0.005 * whole_s
        )
        if whole_s:
            yield {
                "load: side": name,
                "s in all": f"{whole_s:.1f}",
                "ms per request": f"{whole_s / count * 1000:.0f}",
                "by process, ms per request (cores busy)": ", ".join(shares),
                "PSS at most, MiB": ", ".join(f"{n} {b / 2**20:.0f}" for n, b in memory.items()),
            }


def _pictures(rounds: Rounds) -> Iterator[Row]:
    for name, turns in _each(rounds):
        counted = _counted(turns)
        ends = _named(counted, "items")
        ends |= {f"fallback {end}": count for end, count in _named(counted, "fallback").items()}
        if counted["untransferred"]:
            ends["fell back"] = counted["untransferred"]
        runs = counted["encoded encoder"] + counted["placed local"]
        tokens, hits = counted["prefix queries"], counted["prefix hits"]
        yield {
            "load: side": name,
            "pictures": str(sum(turn.pictures for turn in turns) or _NONE),
            "what became of them": ", ".join(f"{end} {n:g}" for end, n in ends.items()) or _NONE,
            "different in their round": str(sum(turn.distinct_pictures for turn in turns) or _NONE),
            "encoder runs": f"{runs:g}" if runs else _NONE,
            "prompt tokens": f"{tokens:g}" if tokens else _NONE,
            "found in a prefix cache": f"{hits / tokens:.1%}" if tokens else _NONE,
        }
