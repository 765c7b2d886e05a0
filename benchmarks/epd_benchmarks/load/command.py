"""``epd-bench load``: sides in turns, by ``vllm bench serve``, and their ratios."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from numpy import quantile

from epd_benchmarks import report
from epd_benchmarks.load import serve
from epd_benchmarks.load import sides as load_sides
from epd_benchmarks.load.serve import Figures, Line, Point
from epd_benchmarks.load.sides import LoadSetting, instance_count, read_sides, share_out
from epd_benchmarks.report import Document, Row
from epd_portable.config.instance import PLATFORMS
from epd_portable.config.load import load_topology
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError, MeasurementError
from epd_portable.launch.plan.file_checks import engine_settings
from epd_portable.launch.plan.machine import allowed_cores, assumed_machine
from epd_portable.platforms.traits import TRAITS

HELP = f"""Compare sides under load: a topology, replicas of plain vLLM, vLLM's own example.

Sides, each as NAME=WHAT or WHAT; ratios are of the first by each of the others:
  ours=configs/1e1pd.yaml        a topology, started by epd-launch
  tcp=configs/1e1pd.yaml,transfer.path=tcp    the topology with other keys
  replicas:2                     two replicas of plain vLLM; requests go to them in turns
  replicas:1                     one plain vLLM over all cores or devices
  upstream:1E1PD                 vLLM's ECExampleConnector with its proxy (see --upstream-proxy)
  replicas:2,tuned               on a CPU with the executor and threads that epd-launch gives
  there=url:http://h:1,http://h:2    servers that run already; requests go to them in turns

Keys of points of load; a key that one leaves out is as in the one before it; images=1/4 and
size=448/1024 draw one of these each time:
{serve.describe_keys()}

Three rates, with an image in one of ten requests, and four images in three of ten:
  epd-bench load --side ours=configs/1e1pd.yaml --side replicas:2 --side replicas:2,tuned \\
    --point rate=2/6/10,share=0.1 --point rate=2,share=0.3,images=4 --json l.json

Sides are measured in turns, each started for its own, on the same cores or devices and with the
same requests, sent by vllm bench serve of the installed vLLM.

Exit status: 0; 1 when something failed, or an item was not transferred; 2 on bad input.
"""


@click.command("load", help=HELP)
@click.option(
    "--side", "side_texts", multiple=True, required=True, metavar="[NAME=]WHAT", help="See above."
)
@click.option(
    "--point",
    "point_texts",
    multiple=True,
    required=True,
    metavar="KEY=VALUE[,...]",
    help="See above.",
)
@click.option("--platform", type=click.Choice(PLATFORMS), default="cpu")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Key of the topology files; plain vLLM gets their engine_args and env.",
)
@click.option("--model", help="Model of all sides.")
@click.option(
    "--upstream-proxy",
    "proxy",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path),
    metavar="FILE",
    help="disagg_epd_proxy.py in the examples of vLLM's sources, for upstream:1E1PD.",
)
@click.option(
    "--seconds",
    default=60.0,
    type=click.FloatRange(min=0.5),
    help="Window of requests, by which a rate gives their number.",
)
@click.option("--rounds", default=3, type=click.IntRange(min=1))
@click.option(
    "--goodput",
    multiple=True,
    metavar="KEY:MS",
    help="Limit for vllm bench serve, as in ttft:500.",
)
@report.json_option
def load_command(
    *,
    side_texts: tuple[str, ...],
    point_texts: tuple[str, ...],
    platform: str,
    overrides: tuple[str, ...],
    model: str | None,
    proxy: Path | None,
    seconds: float,
    rounds: int,
    goodput: tuple[str, ...],
    json_file: Path | None,
) -> None:
    """Measure sides under load; users read `HELP`."""
    points, sides = serve.read_points(point_texts), read_sides(side_texts)
    requests = {
        (point, number): point.lines(seconds, number)
        for number in range(rounds)
        for point in points
    }
    if proxy is None and any(side.kind == "upstream" for side in sides):
        raise ConfigError("--side upstream:1E1PD: the proxy is missing; add --upstream-proxy FILE")
    settings = overrides if model is None else (*overrides, f"model={json.dumps(model)}")
    topologies = _topologies(sides, platform, settings)
    counts = {side.name: instance_count(side, topologies.get(side.name)) for side in sides}
    traits, devices = TRAITS[platform], None
    if traits.visible_devices_env is not None:
        most = tuple(map(str, range(max(counts.values()))))
        devices = assumed_machine(traits, os.environ).devices or most
    turns: list[Figures] = []
    report.stop_at_sigterm()
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as folder:
        setting = LoadSetting(
            sides=sides,
            platform=platform,
            topologies=topologies,
            settings=settings,
            allotment=share_out(counts, cores=allowed_cores(), devices=devices),
            folder=Path(folder),
            upstream_proxy=proxy,
        )
        report.progress(str(setting.allotment))
        for number in range(rounds):
            # The first of one round is the last of the next.
            for side in sides[:: -1 if number % 2 else 1]:
                report.progress(f"round {number + 1}: starting {side.name}")
                with load_sides.start_side(side, setting) as (urls, parts):
                    for point in points:
                        lines = requests[point, number]
                        found = _turn(urls, parts, point, number, lines, setting, goodput)
                        name = {"point": point.key, "round": number, "side": side.name}
                        turns.append(name | found)
                        report.progress(f"{point.key}: {found['failed']} requests failed")
                report.write(report_of(turns, setting), json_file)
    report.finish(report_of(turns, setting), json_file)
    for turn in turns:
        if turn["failed"] or turn["untransferred"]:
            raise MeasurementError(
                f"{turn['side']}, {turn['point']}: {turn['failed']} requests failed, "
                f"{turn['untransferred']} items were not encoded and transferred: {turn['problem']}"
            )


def _turn(
    urls: Sequence[str],
    parts: Sequence[load_sides.Part],
    point: Point,
    number: int,
    lines: list[Line],
    setting: LoadSetting,
    goodput: tuple[str, ...],
) -> Figures:
    """Return the figures of one side in one round of a point."""
    folder, cores = setting.folder, setting.allotment.rest
    clients = functools.partial(serve.bench, urls, folder=folder, cores=cores)
    warm = Point(prompts=4 * len(urls), clients=1, share=0.5, output=8, text=20)
    clients(warm.lines(0, -1 - number), warm, seed=0, goodput=())
    counted, cpu_s = load_sides.read_counters(parts), load_sides.read_cpu_s(parts)
    found = clients(lines, point, seed=number, goodput=goodput)
    cpu_s = load_sides.read_cpu_s(parts) - cpu_s
    counted = load_sides.read_counters(parts) - counted
    return {
        **found,
        "cpu_s": cpu_s,
        "memory_bytes": load_sides.read_memory_bytes(parts),
        "counted": dict(counted),
        "untransferred": load_sides.untransferred(counted),
    }


def _topologies(sides: Any, platform: str, overrides: tuple[str, ...]) -> dict[str, Topology]:
    """Return the topology of each side; plain vLLM gets the arguments of the first."""
    first = next((side for side in sides if side.file is not None), None)
    found = {}
    for side in sides:
        if side.kind == "url":
            continue
        source = first if side.file is None else side
        if source is None:
            raise ConfigError(
                f"--side {side.what}: the model and engine_args are missing; add a topology, as in "
                "--side ours=configs/1e1pd.yaml"
            )
        settings = (*(source.settings if source is not side else ()), *side.settings)
        found[side.name] = load_topology(
            source.file,
            platform,
            overrides=(*overrides, *settings),
            checks=[functools.partial(engine_settings, TRAITS[platform])],
        )
    return found


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


def report_of(turns: Sequence[Figures], setting: LoadSetting) -> Document:
    """Return the report of the turns so far."""
    first, *others = (side.name for side in setting.sides)
    sides = (f"{side.name} ({side.what})" for side in setting.sides)
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
        "Times in ms: " + " / ".join(serve.QUANTILES): [*_times(turns)],
        "Throughput of vllm bench serve, CPU time and memory": [*_usage(turns)],
    }
    return report.make_report(
        f"Under load: {', '.join(sides)}",
        notes=notes,
        tables={title: rows for title, rows in tables.items() if rows},
        samples=turns,
    )


def _each(turns: Sequence[Figures]) -> Iterator[tuple[str, list[Figures]]]:
    for key in dict.fromkeys((turn["point"], turn["side"]) for turn in turns):
        yield ": ".join(key), [turn for turn in turns if (turn["point"], turn["side"]) == key]


def _time(kind: str, quantity: str, name: str) -> Callable[[Figures], float | None]:
    return lambda turn: turn["times_s"].get(kind, {}).get(quantity, {}).get(name)


def _cpu(turn: Figures) -> float | None:
    return sum(turn["cpu_s"].values()) / turn["requests"]["all"] or None


def _memory(turn: Figures) -> float | None:
    return sum(turn["memory_bytes"].values()) or None


def _ratios(turns: Sequence[Figures], first: str, others: Sequence[str]) -> Iterator[Row]:
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
            yield row | {"rounds": str(len(rounds))}


def _shown(ratios: Sequence[float]) -> str:
    if not ratios:
        return "–"
    median, _, spread = report.ratio(ratios, 0.0).partition(" ")
    return f"**{median}** {spread}" if float(median) > 1 else f"{median} {spread}"


def _median(values: Iterable[float | None], scale: float) -> str:
    found = [value for value in values if value is not None]
    return f"{quantile(found, 0.5) * scale:.1f}" if found else "–"


def _times(turns: Sequence[Figures]) -> Iterator[Row]:
    for name, of_side in _each(turns):
        for kind in serve.KINDS:
            if count := sum(turn["requests"].get(kind, 0) for turn in of_side):
                row = {"load: side: requests": f"{name}: {kind}"}
                for quantity in serve.QUANTITIES:
                    figures = (_time(kind, quantity, each) for each in serve.QUANTILES)
                    row[quantity] = " / ".join(_median(map(each, of_side), 1e3) for each in figures)
                yield row | {"requests": str(count)}


def _usage(turns: Sequence[Figures]) -> Iterator[Row]:
    for name, of_side in _each(turns):
        used_s, memory = Counter[str](), Counter[str]()
        for turn in of_side:
            used_s.update(turn["cpu_s"])
            memory |= Counter(turn["memory_bytes"])
        count = sum(turn["requests"]["all"] for turn in of_side)
        yield {
            "load: side": name,
            **{
                title: _median((turn["vllm"][key] for turn in of_side), 1)
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
