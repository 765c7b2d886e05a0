"""The command ``epd-bench load``."""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from epd_portable.bench import console, report
from epd_portable.bench.load import checkpoint
from epd_portable.bench.load import report as load_report
from epd_portable.bench.load.measure import LoadResults, Measurement
from epd_portable.bench.load.plan import LoadPlan, LoadPoint, read_points
from epd_portable.bench.load.presets import PRESETS
from epd_portable.bench.load.setting import LoadSetting
from epd_portable.bench.load.sides import Allotment, LoadSide, instance_count, read_sides, share_out
from epd_portable.bench.mix import describe_keys
from epd_portable.config.instance import PLATFORMS, PlatformName
from epd_portable.config.load import load_topology
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError, MeasurementError
from epd_portable.launch.commands.command_line import stopping_at_sigterm
from epd_portable.launch.plan.file_checks import engine_settings
from epd_portable.launch.plan.machine import allowed_cores, assumed_machine
from epd_portable.platforms.traits import TRAITS

HELP = f"""Compare sides under load: a topology, replicas of plain vLLM, vLLM's own example.

\b
Sides, each as NAME=WHAT or WHAT; ratios are of the first by each of the others:
  ours=configs/1e1pd.yaml        a topology, started by epd-launch
  tcp=configs/1e1pd.yaml,transfer.path=tcp    the same with other keys
  replicas:2                     two replicas of plain vLLM; requests go to them in turns
  replicas:1                     one plain vLLM over all cores or devices
  replicas:1,engine_args.api_server_count=2    the same with other arguments of the engine
  upstream:1E1PD                 vLLM's own ECExampleConnector over /dev/shm, with its own proxy
                                 (see --upstream-proxy)
  replicas:2,tuned               on a CPU with the executor, threads and freedom of API servers that
                                 epd-launch gives its own instances; so upstream:1E1PD.
                                 Without it plain vLLM runs as it does by itself
  there=url:http://h:1,http://h:2    servers that run already; requests go to them in turns

\b
Keys of points of load; what one leaves out is as in the one before it; pictures=1/4 and
size=448/1024 draw one of these each time:
{describe_keys(LoadPoint)}

\b
Three rates, with a picture in one of ten requests, and four pictures in three of ten:
  epd-bench load --side ours=configs/1e1pd.yaml --side replicas:2 --side replicas:2,tuned \\
    --model shape --point rate=2/6/10,share=0.1 --point rate=2,share=0.3,pictures=4 --json l.json

Sides are measured in turns, each started for its own. Every side gets the same cores or devices
and, in every round, the same requests; the first of one round is the last of the next. Rounds in
which the clients sent requests late are refused and measured again.

\b
Benchmarks that others describe; other options take the place of theirs:
  epd-bench load --preset vision-arena
  epd-bench load --preset random-mm --platform cuda --model Qwen/Qwen3-VL-4B-Instruct

Exit status: 0; 1 when something failed, was refused, or fell back, or when a preset
got fewer answers than it asked for; 2 on bad input.
"""


def _use_preset(context: click.Context, option: click.Parameter, name: str | None) -> str | None:
    """Make a preset's options the defaults; a callback of click."""
    context.default_map = {**PRESETS[name]} if name else None
    return name


@click.command("load", help=HELP)
@click.option(
    "--preset",
    type=click.Choice(sorted(PRESETS)),
    callback=_use_preset,
    is_eager=True,
    help="Options of a benchmark that others describe.",
)
@click.option(
    "--side",
    "side_texts",
    multiple=True,
    required=True,
    metavar="[NAME=]WHAT",
    help="What is measured, see above; may be repeated.",
)
@click.option(
    "--point",
    "point_texts",
    multiple=True,
    required=True,
    metavar="KEY=VALUE[,...]",
    help="What is asked, see above; may be repeated.",
)
@click.option(
    "--platform",
    type=click.Choice(PLATFORMS),
    default="cpu",
    show_default=True,
    help="What all sides run on.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set one key of the topology files, as in engine_args.max_model_len=8192; plain vLLM gets "
    "their engine_args and env. May be repeated.",
)
@click.option(
    "--model",
    help="Replaces the model of the topology files; 'shape' is one with random weights, made once "
    "and kept.",
)
@click.option(
    "--upstream-proxy",
    "proxy",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path),
    metavar="FILE",
    help="The proxy of vLLM's example, disagg_epd_proxy.py of its release; sides that are the "
    "example need it.",
)
@click.option(
    "--seconds",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0.5),
    help="Window in which requests are sent, to each side in each round.",
)
@click.option(
    "--rounds",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Times that every load is measured on every side; a page says where pictures need more.",
)
@click.option(
    "--ttft-ms",
    default=math.inf,
    type=click.FloatRange(min=1),
    help="Limit of TTFT for goodput, in milliseconds.",
)
@click.option(
    "--tpot-ms",
    default=math.inf,
    type=click.FloatRange(min=0.1),
    help="Limit of TPOT for goodput, in milliseconds.",
)
@console.json_option
def load_command(
    *,
    preset: str | None,
    side_texts: tuple[str, ...],
    point_texts: tuple[str, ...],
    platform: PlatformName,
    overrides: tuple[str, ...],
    model: str | None,
    proxy: Path | None,
    seconds: float,
    rounds: int,
    ttft_ms: float,
    tpot_ms: float,
    json_file: Path | None,
) -> None:
    """Measure sides under load; users read `HELP`."""
    plan = LoadPlan(
        points=read_points(point_texts),
        seconds=seconds,
        rounds=rounds,
        ttft_s=ttft_ms / 1000,
        tpot_s=tpot_ms / 1000,
    )
    for point in plan.points:
        if point.file:  # That it has too few lines is said before minutes of starting.
            plan.requests(point, rounds - 1)
    sides = read_sides(side_texts)
    if proxy is None and any(side.kind == "upstream" for side in sides):
        raise ConfigError(
            "--side upstream:1E1PD: name the example's proxy by --upstream-proxy: "
            "disagg_epd_proxy.py in the examples of vLLM's sources"
        )
    if model == checkpoint.MODEL:
        model = str(checkpoint.cached_checkpoint())
    settings = overrides if model is None else (*overrides, f"model={json.dumps(model)}")
    topologies = _load_topologies(sides, platform, settings)
    allotment = _allot(platform, sides, topologies)
    with stopping_at_sigterm(), tempfile.TemporaryDirectory(prefix="epd-bench-") as folder:
        setting = LoadSetting(
            plan=plan,
            sides=sides,
            platform=platform,
            topologies=topologies,
            settings=settings,
            allotment=allotment,
            folder=Path(folder),
            upstream_proxy=proxy,
        )
        console.progress(str(allotment))
        results = Measurement(
            setting,
            lambda so_far: report.write(load_report.make_report(so_far, setting), json_file),
        ).run()
    console.finish(load_report.make_report(results, setting), json_file)
    judge(results, setting, every=preset is not None)


def _load_topologies(
    sides: Sequence[LoadSide], platform: PlatformName, overrides: Sequence[str]
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
                f"--side {side.what}: plain vLLM gets the model and the engine_args of a "
                "topology: add one, as in --side ours=configs/1e1pd.yaml"
            )
        assert source.file is not None
        settings = (*source.settings, *side.settings) if side.plain else side.settings
        found[side.name] = load_topology(
            source.file,
            platform,
            overrides=(*overrides, *settings),
            checks=[functools.partial(engine_settings, TRAITS[platform])],
        )
    return found


def _allot(
    platform: PlatformName, sides: Sequence[LoadSide], topologies: dict[str, Topology]
) -> Allotment:
    counts = {side.name: instance_count(side, topologies.get(side.name)) for side in sides}
    traits = TRAITS[platform]
    devices = None
    if traits.visible_devices_env is not None:
        most = tuple(map(str, range(max(counts.values()))))
        devices = assumed_machine(traits, os.environ).devices or most
    return share_out(counts, cores=allowed_cores(), devices=devices)


def judge(results: LoadResults, setting: LoadSetting, *, every: bool) -> None:
    """Say by the exit status whether the figures are those of what was asked for.

    That is when `every` request was answered, or at least one.

    Raises:
        MeasurementError: They are not.
    """
    if any(results.count(point) < setting.plan.rounds for point in setting.plan.points):
        refused = results.refused()
        raise MeasurementError(
            f"too few rounds count, because {len(refused)} turns were refused: {refused[0]}"
        )
    for side in setting.sides:
        turns = [turn for turn in results.turns if turn.side == side.name]
        failed, asked = sum(turn.failed for turn in turns), sum(turn.count for turn in turns)
        if failed == asked or (failed and every):
            problem = next(turn.problem for turn in turns if turn.failed)
            raise MeasurementError(
                f"{side.name} answered {asked - failed} of {asked} requests: {problem}"
            )
    if fell_back := load_report.find_fallbacks(results, setting):
        raise MeasurementError(
            f"something fell back: {fell_back}; the figures are not those of the topology"
        )
