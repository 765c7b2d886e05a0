"""The tables of measurements once more, from the samples in the file, by code of its own.

Nothing here is shared with `epd_benchmarks`, whose reports are what is checked.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

Document = dict[str, Any]
Row = dict[str, str]
"""Cells by column: the first of a row, which names it, and those that can be computed."""


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value below which a share of all lies, between its neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Iterable[float]) -> float:
    """Return the middle one."""
    return quantile(values, 0.5)


def ratio(values: Sequence[float], peers: Sequence[float]) -> str:
    """Return the median of the ratios of pairs, with their quartiles."""
    pairs = [value / peer for value, peer in zip(values, peers, strict=True)]
    return f"{median(pairs):.2f} ({quantile(pairs, 0.25):.2f}–{quantile(pairs, 0.75):.2f})"


def grouped(samples: Iterable[Document], *names: str) -> dict[tuple[Any, ...], list[Document]]:
    """Return samples by what they are of."""
    found: dict[tuple[Any, ...], list[Document]] = defaultdict(list)
    for each in samples:
        found[tuple(each[name] for name in names)].append(each)
    return found


def rounds(document: Document) -> list[Document]:
    """Return one sample a round, of files with a line for each case and its values by round."""
    found = []
    for case in document["samples"]:
        values = {name: each for name, each in case.items() if isinstance(each, list)}
        found += [
            {**case, **dict(zip(values, one, strict=True))}
            for one in zip(*values.values(), strict=True)
        ]
    return found


def column(group: Iterable[Document], name: str) -> list[float]:
    """Return one value of each sample."""
    return [each[name] for each in group]


# -- transfer --------------------------------------------------------------------------------------


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def _transfers(document: Document) -> Iterator[tuple[Row, tuple[Any, ...], list[Document]]]:
    for case, group in grouped(rounds(document), "path", "nbytes", "encode_s").items():
        grant = "granted before" if case[2] else "granted after"
        yield {"path, size, grant": f"{case[0]}, {_size(case[1])}, {grant}"}, case, group


def against_memcpy(document: Document) -> Iterator[Row]:
    for name, (_, nbytes, _), group in _transfers(document):
        total = column(group, "total_s")
        placing = column(group, "placing_s") if "placing_s" in group[0] else [0.0]
        yield name | {
            "ratio": ratio(total, column(group, "memcpy_s")),
            "placing, ms": f"{median(placing) * 1e3:.3f}",
            "median, ms": f"{median(total) * 1e3:.2f}",
            "p90, ms": f"{quantile(total, 0.9) * 1e3:.2f}",
            "memcpy, ms": f"{median(column(group, 'memcpy_s')) * 1e3:.3f}",
            "GB/s": f"{nbytes / median(total) / 1e9:.3g}",
            "rounds": str(len(group)),
        }


def by_another_path(document: Document) -> Iterator[Row]:
    cases = {case: column(group, "total_s") for _, case, group in _transfers(document)}
    for name, case, group in _transfers(document):
        total = column(group, "total_s")
        yield name | {
            f"by {path}": "–" if path == case[0] else ratio(total, cases[(path, *case[1:])])
            for path, *_ in cases
        }


def where_the_time_goes(document: Document) -> Iterator[Row]:
    parts = {
        "wait for grant": ("grant_wait_s",),
        "write": ("write_s",),
        "written to landed": ("notice_s",),
        "landed to placed": ("place_s",),
        "control": ("grant_wait_s", "notice_s"),
    }
    for name, _, group in _transfers(document):
        times = {
            part: median(sum(each[key] for key in keys) for each in group)
            for part, keys in parts.items()
            if keys[0] in group[0]
        }
        row = name | {part: f"{value * 1e3:.3f}" for part, value in times.items()}
        if "turns" in group[0]:
            row["turns, mean"] = f"{fmean(column(group, 'turns')):.1f}"
        yield row


# -- steps and stores ------------------------------------------------------------------------------


def steps(document: Document) -> Iterator[Row]:
    for (decoding, items, waiting), group in grouped(
        rounds(document), "decoding", "items", "waiting"
    ).items():
        step, asking = column(group, "step_s"), median(column(group, "asking_s"))
        yield {
            "decoding × items": f"{decoding} × {items}",
            "waiting": str(waiting),
            "ratio": f"{median(step) / asking:.2f}",
            "p50": f"{median(step) * 1e6:.1f}",
            "p90": f"{quantile(step, 0.9) * 1e6:.1f}",
            "only asking, p50": f"{asking * 1e6:.1f}",
        }


def stores(document: Document) -> Iterator[Row]:
    entries = [each for each in rounds(document) if "kind" in each]
    for (kind, nbytes), group in grouped(entries, "kind", "nbytes").items():
        row = {"store": kind, "MiB": f"{nbytes / (1 << 20):g}"}
        for title, peer, own in (
            ("written / SET", "set_s", "save_s"),
            ("ready / GET", "get_s", "ready_s"),
        ):
            known = all(each["get_s"] for each in group)
            value = median(each[peer] / each[own] for each in group) if known else None
            row[title] = "–" if value is None else f"{value:.2f}"
        for title, own in (
            ("written", "save_s"),
            ("asked", "ask_s"),
            ("ready", "ready_s"),
            ("plain copy", "memcpy_s"),
        ):
            row[title] = f"{median(column(group, own)) * 1e3:.2f}"
        yield row


def pictures_from_a_store(document: Document) -> Iterator[Row]:
    engines = [each for each in rounds(document) if "pixels" in each]
    for (pixels,), group in grouped(engines, "pixels").items():
        ready, encoded = column(group, "ready_s"), column(group, "encode_s")
        shares = [a / b for a, b in zip(ready, encoded, strict=True)]
        yield {
            "picture": f"{pixels} × {pixels}",
            "KiB": str(group[0]["nbytes"] >> 10),
            "ratio": f"{median(shares):.3f}",
            "ready from the store": f"{median(ready) * 1e3:.2f}",
            "encoded": f"{median(encoded) * 1e3:.1f}",
        }


# -- a topology under load -------------------------------------------------------------------------


def _rounds(document: Document) -> dict[str, dict[str, list[Document]]]:
    """Return the turns that count, by point and side: rounds in which no side was refused."""
    bad = {(each["point"], each["round"]) for each in document["samples"] if each["refused"]}
    found: dict[str, dict[str, list[Document]]] = defaultdict(lambda: defaultdict(list))
    for each in document["samples"]:
        if (each["point"], each["round"]) not in bad:
            found[each["point"]][each["side"]].append(each)
    return found


def _sides(document: Document) -> Iterator[tuple[Row, list[Document]]]:
    for point, by_side in _rounds(document).items():
        for side, turns in by_side.items():
            yield {"load: side": f"{point}: {side}"}, turns


def _counted(turns: Sequence[Document], *names: str) -> float:
    return float(sum(turn["counted"].get(name, 0.0) for turn in turns for name in names))


def what_became_of_pictures(document: Document) -> Iterator[Row]:
    for name, turns in _sides(document):
        outcomes = sorted({key for turn in turns for key in turn["counted"] if "items " in key})
        if outcomes:
            counts = {outcome: _counted(turns, outcome) for outcome in outcomes}
            parts = (f"{key.removeprefix('items ')} {count:.0f}" for key, count in counts.items())
            yield name | {"items": ", ".join(parts)}


_QUANTITIES = ("TTFT", "TPOT", "longest ITL", "E2E")
_COMPARED = re.compile(r"(TTFT|TPOT|longest ITL|E2E) (p\d\d), (\w+)")


def _requests(turns: Sequence[Document]) -> int:
    return sum(sum(turn["requests"].values()) for turn in turns)


def _counts(turns: Sequence[Document]) -> str:
    pictures = sum(turn["requests"].get("pictures", 0) for turn in turns)
    return f"{_requests(turns)}, {pictures}"


def _cpu_s(turn: Document) -> float:
    used_s = 0.0
    for used in turn["cpu_s"].values():
        used_s += sum(used.values()) if isinstance(used, dict) else used
    return used_s / _requests([turn])


def _grew(turn: Document) -> bool:
    return any(
        last >= 2 and last >= 1.25 * second and second >= 1.25 * first
        for first, second, last in turn.get("open_requests", {}).values()
    )


def _over(turns: Sequence[Document]) -> bool:
    grew = list(map(_grew, turns))
    return grew.count(True) > grew.count(False)


def beside_other_sides(document: Document) -> Iterator[Row]:
    own, *others = document["summary"]["sides"]
    titles = {each["title"]: each["columns"] for each in document["tables"]}
    columns = titles[f"{own} by the other sides"]
    for point, by_side in _rounds(document).items():
        for other in others:
            pairs = list(zip(by_side[own], by_side[other], strict=True))
            assert all(turn["round"] == peer["round"] for turn, peer in pairs)
            row = {
                "load": point,
                "by": other,
                "rounds": str(len(pairs)),
                "requests, with pictures": _counts(by_side[own]),
                "over capacity": ", ".join(s for s in (own, other) if _over(by_side[s])) or "–",
            }
            for name in columns:
                found = None
                if what := _COMPARED.fullmatch(name):
                    quantity, statistic, kind = what.groups()
                    times = [[turn["times_s"].get(kind) for turn in pair] for pair in pairs]
                    found = [
                        a[quantity][statistic] / b[quantity][statistic] for a, b in times if a and b
                    ]
                elif name == "CPU time":
                    # Unknown of sides that ran already.
                    found = [_cpu_s(a) / _cpu_s(b) for a, b in pairs if a["cpu_s"] and b["cpu_s"]]
                if found:
                    row[name] = f"{median(found):.2f} ({min(found):.2f}–{max(found):.2f})"
            yield row


def times_under_load(document: Document) -> Iterator[Row]:
    for point, by_side in _rounds(document).items():
        for side, turns in by_side.items():
            over = ", over capacity" if _over(turns) else ""
            for kind in ("text", "pictures", "all"):
                times = [turn["times_s"][kind] for turn in turns if kind in turn["times_s"]]
                if not times:
                    continue
                row = {"load: side: requests": f"{point}: {side}{over}: {kind}"}
                for name in _QUANTITIES:
                    digits = 0 if name in ("TTFT", "E2E") else 1
                    row[name] = " / ".join(
                        f"{median(each[name][share] for each in times) * 1e3:.{digits}f}"
                        for share in ("p50", "p90", "p99")
                    )
                longest = max(each["longest ITL"]["max"] for each in times)
                row["longest ITL of all"] = f"{longest * 1e3:.0f}"
                count = _requests(turns)
                if kind != "all":
                    count = sum(turn["requests"][kind] for turn in turns)
                yield row | {"requests": str(count)}


def cpu_under_load(document: Document) -> Iterator[Row]:
    for name, turns in _sides(document):
        used = sum(_cpu_s(turn) * _requests([turn]) for turn in turns)
        used_ms = used / _requests(turns) * 1e3
        yield name | {"s in all": f"{used:.1f}", "ms per request": f"{used_ms:.0f}"}


def starts(document: Document) -> Iterator[Row]:
    for (cache,), group in grouped(document["samples"], "cache").items():
        own, router = (
            [each["ready_s"] for each in group if each["front"] == front]
            for front in ("engine", "router")
        )
        ratios = [a / b for a, b in zip(own, router, strict=True)]
        yield {
            "page cache": cache,
            "engine front by router": f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
            "engine front, s": f"{median(own):.1f}",
            "router, s": f"{median(router):.1f}",
            "rounds": str(len(ratios)),
        }


def memory_under_load(document: Document) -> Iterator[Row]:
    most: dict[str, list[float]] = {}
    for by_side in _rounds(document).values():
        for side, turns in by_side.items():
            for turn in turns:
                for part, used in turn["memory"].items():
                    now = [used["rss_bytes"] / 2**20, used["pss_bytes"] / 2**20]
                    before = most.get(f"{side}: {part}", now)
                    most[f"{side}: {part}"] = list(map(max, before, now))
    for part, (rss, pss) in most.items():
        yield {"side: part": part, "RSS": f"{rss:.0f}", "PSS": f"{pss:.0f}"}


def goodput_under_load(document: Document) -> Iterator[Row]:
    own = next(iter(document["summary"]["sides"]))
    for point, by_side in _rounds(document).items():
        rates = {
            side: [turn["good"] / turn["window_s"] for turn in turns]
            for side, turns in by_side.items()
        }
        for side, turns in by_side.items():
            pairs = [a / b for a, b in zip(rates[own], rates[side], strict=True)]
            spread = f"{median(pairs):.2f} ({min(pairs):.2f}–{max(pairs):.2f})"
            tokens = median(turn["tokens"] / turn["wall_s"] for turn in turns)
            yield {
                "load: side": f"{point}: {side}",
                f"goodput, {own} by side": "–" if side == own else spread,
                "goodput, requests/s": f"{median(rates[side]):.2f}",
                "rounds with 99 of 100 within the limits": (
                    f"{sum(map(_met, turns))} of {len(turns)}"
                ),
                "output tokens/s": f"{tokens:.1f}",
                "failed": str(sum(turn["failed"] for turn in turns)),
            }


def as_bench_serve_says(document: Document) -> Iterator[Row]:
    for name, turns in _sides(document):
        asked, failed = _requests(turns), sum(turn["failed"] for turn in turns)
        yield name | {
            "answered of asked": f"{asked - failed} of {asked}",
            **{
                figure: f"{median(turn['serving'][figure] for turn in turns):.2f}"
                for figure in turns[0]["serving"]
            },
        }


def _met(turn: Document) -> bool:
    return bool(turn["good"] >= 0.99 * _requests([turn]))


def highest_rates_under_load(document: Document) -> Iterator[Row]:
    points = _rounds(document)
    if document["summary"].get("kind") != "search":
        raise KeyError("no rate was sought")
    (about,) = {point.split(", ")[1] for point in points}
    own, *_ = document["summary"]["sides"]
    best: dict[str, float] = {}
    for side in document["summary"]["sides"]:
        met = {
            float(point.partition("/s")[0]): all(map(_met, by_side[side]))
            for point, by_side in points.items()
        }
        missed = min(rate for rate, did in met.items() if not did)
        best[side] = max(rate for rate in met if rate < missed)
        above = [rate for rate, did in sorted(met.items()) if did and rate > missed]
        yield {
            "request: side": f"{about}: {side}",
            f"{own} by side": "–" if side == own else f"{best[own] / best[side]:.2f}",
            "met, 1/s": f"{best[side]:g}",
            "missed, 1/s": f"{missed:g}",
            "met above a missed one, 1/s": ", ".join(f"{rate:g}" for rate in above) or "–",
        }


def _saved(turns: Sequence[Document]) -> Row:
    pictures = sum(turn["pictures"] for turn in turns)
    runs = _counted(turns, "encoded encoder", "placed local")
    tokens, hits = _counted(turns, "prefix queries"), _counted(turns, "prefix hits")
    row = {"pictures": str(pictures or "–"), "prompt tokens": f"{tokens:.0f}"}
    if runs:
        distinct = sum(turn["distinct_pictures"] for turn in turns)
        row["of these different in their round"] = str(distinct)
        row["encoder runs"] = f"{runs:.0f}"
    else:
        row |= dict.fromkeys(("of these different in their round", "encoder runs"), "–")
    return row | {"found in a prefix cache": f"{hits / tokens:.1%}"}


def what_caches_saved(document: Document) -> Iterator[Row]:
    for name, turns in _sides(document):
        yield name | _saved(turns)


def what_caches_saved_by_round(document: Document) -> Iterator[Row]:
    for (number, side), turns in grouped(document["samples"], "round", "side").items():
        yield {"round, side": f"{number + 1}, {side}"} | _saved(turns)


# -- a render call on the way ----------------------------------------------------------------------


def render_calls(document: Document) -> Iterator[Row]:
    for (size, at_once), turns in grouped(document["samples"], "size", "at_once").items():
        pairs = list(grouped(turns, "round").values())

        def by_other(figure: Callable[[Document], float], pairs: Any = pairs) -> str:
            ratios = []
            for pair in pairs:
                sides = {each["side"]: figure(each) for each in pair}
                ratios.append(sides["with"] / sides["without"])
            return f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"

        yield {
            "pictures, at once": f"{size} × {size}, {at_once}",
            "TTFT p50": by_other(lambda turn: median(turn["ttft_s"])),
            "TTFT p90": by_other(lambda turn: quantile(turn["ttft_s"], 0.9)),
            "answers a second": by_other(lambda turn: len(turn["ttft_s"]) / turn["wall_s"]),
        }


def render_calls_cpu(document: Document) -> Iterator[Row]:
    for (size, at_once, side), turns in grouped(
        document["samples"], "size", "at_once", "side"
    ).items():
        row = {"pictures, at once: side": f"{size} × {size}, {at_once}: {side}"}
        for part in ("router", "render", "engines"):
            used = [turn[f"{part}_s"] / len(turn["ttft_s"]) for turn in turns]
            row[part] = f"{median(used) * 1000:.1f}"
        first = [median(turn["ttft_s"]) for turn in turns]
        yield row | {"TTFT p50": f"{median(first) * 1000:.0f}"}


TABLES: dict[tuple[str, str], Callable[[Document], Iterator[Row]]] = {
    ("Against memcpy of the same bytes", "path, size, grant"): against_memcpy,
    ("By another path", "path, size, grant"): by_another_path,
    ("Where the time goes", "path, size, grant"): where_the_time_goes,
    ("Times in µs", "decoding × items"): steps,
    ("Medians in ms; ratios: redis-benchmark", "store"): stores,
    ("Real engines: a picture from the store", "picture"): pictures_from_a_store,
    (r"\w+ by the other sides", "load"): beside_other_sides,
    ("Times in ms", "load: side: requests"): times_under_load,
    ("CPU time", "load: side"): cpu_under_load,
    ("Memory after a turn", "side: part"): memory_under_load,
    ("From the start until", "page cache"): starts,
    ("Highest rate with p99 of", "request: side"): highest_rates_under_load,
    ("As vllm bench serve says it", "load: side"): as_bench_serve_says,
    ("Goodput and throughput", "load: side"): goodput_under_load,
    ("What became of the pictures", "load: side"): what_became_of_pictures,
    ("What caches saved", "load: side"): what_caches_saved,
    ("What caches saved", "round, side"): what_caches_saved_by_round,
    ("With a render call by without it", "pictures, at once"): render_calls,
    ("CPU time of a request, ms", "pictures, at once: side"): render_calls_cpu,
}
"""By a pattern of the beginning of a table's heading, and the name of its first column."""
