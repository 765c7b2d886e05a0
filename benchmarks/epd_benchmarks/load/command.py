"""``epd-bench load``: sides in turns, by ``vllm bench serve``, and their ratios."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click

from epd_benchmarks import console, report
from epd_benchmarks.load import tables, usage
from epd_benchmarks.load.points import Line, Point, describe_keys, read_points
from epd_benchmarks.load.serve import bench
from epd_benchmarks.load.sides import LoadSetting, instance_count, read_sides, share_out
from epd_benchmarks.load.start import RunningSide, start_side
from epd_portable.config.instance import PLATFORMS, PlatformName
from epd_portable.config.load import load_topology
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError, MeasurementError
from epd_portable.launch.plan.file_checks import engine_settings
from epd_portable.launch.plan.machine import allowed_cores, assumed_machine
from epd_portable.platforms.traits import TRAITS

WARM_UP = 4
"""Requests before each turn, half of them with images."""

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
{describe_keys()}

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
@click.option("--platform", type=click.Choice(PLATFORMS), default="cpu", show_default=True)
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
    show_default=True,
    type=click.FloatRange(min=0.5),
    help="Window of requests, by which a rate gives their number.",
)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--goodput",
    multiple=True,
    metavar="KEY:MS",
    help="Limit for vllm bench serve, as in ttft:500.",
)
@console.json_option
def load_command(
    *,
    side_texts: tuple[str, ...],
    point_texts: tuple[str, ...],
    platform: PlatformName,
    overrides: tuple[str, ...],
    model: str | None,
    proxy: Path | None,
    seconds: float,
    rounds: int,
    goodput: tuple[str, ...],
    json_file: Path | None,
) -> None:
    """Measure sides under load; users read `HELP`."""
    points, sides = read_points(point_texts), read_sides(side_texts)
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
    turns: list[dict[str, Any]] = []
    console.stop_at_sigterm()
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
        console.progress(str(setting.allotment))
        for number in range(rounds):
            # The first of one round is the last of the next.
            for side in sides[:: -1 if number % 2 else 1]:
                console.progress(f"round {number + 1}: starting {side.name}")
                with start_side(side, setting) as running:
                    for point in points:
                        lines = requests[point, number]
                        turns.append(_turn(running, point, number, lines, setting, goodput))
                report.write(tables.make_report(turns, setting), json_file)
    console.finish(tables.make_report(turns, setting), json_file)
    for turn in turns:
        if turn["failed"] or turn["untransferred"]:
            raise MeasurementError(
                f"{turn['side']}, {turn['point']}: {turn['failed']} requests failed, "
                f"{turn['untransferred']} items were not encoded and transferred: {turn['problem']}"
            )


def _turn(
    running: RunningSide,
    point: Point,
    number: int,
    lines: list[Line],
    setting: LoadSetting,
    goodput: tuple[str, ...],
) -> dict[str, Any]:
    """Return the figures of one side in one round of a point."""
    folder = setting.folder / "clients"
    folder.mkdir(exist_ok=True)
    clients = functools.partial(bench, running.urls, folder=folder, cores=setting.allotment.rest)
    warm = Point(prompts=WARM_UP * len(running.urls), clients=1, share=0.5, output=8, text=20)
    clients(warm.lines(0, -1 - number), warm, seed=0, goodput=())
    parts = running.parts
    counted, cpu_s = usage.read_counters(parts), usage.read_cpu_s(parts)
    found = clients(lines, point, seed=number, goodput=goodput)
    cpu_s = {n: max(0.0, s - cpu_s.get(n, 0.0)) for n, s in usage.read_cpu_s(parts).items()}
    counted = usage.read_counters(parts) - counted
    console.progress(f"{point.key}, round {number + 1}, {running.name}: {found['failed']} failed")
    return {
        "point": point.key,
        "round": number,
        "side": running.name,
        **found,
        "cpu_s": cpu_s,
        "memory_bytes": usage.read_memory_bytes(parts),
        "counted": dict(counted),
        "untransferred": usage.untransferred(counted),
    }


def _topologies(
    sides: Any, platform: PlatformName, overrides: tuple[str, ...]
) -> dict[str, Topology]:
    """Return the topology of each side; plain vLLM gets the arguments of the first."""
    first = next((side for side in sides if side.file is not None), None)
    found = {}
    for side in sides:
        if side.kind == "url":
            continue
        source = first if side.plain else side
        if source is None:
            raise ConfigError(
                f"--side {side.what}: the model and engine_args are missing; add a topology, as in "
                "--side ours=configs/1e1pd.yaml"
            )
        settings = (*source.settings, *side.settings) if side.plain else side.settings
        found[side.name] = load_topology(
            source.file,
            platform,
            overrides=(*overrides, *settings),
            checks=[functools.partial(engine_settings, TRAITS[platform])],
        )
    return found
