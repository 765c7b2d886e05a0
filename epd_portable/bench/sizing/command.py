"""The command ``epd-bench plan``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from epd_portable.bench import chart, console
from epd_portable.bench import report as reports
from epd_portable.bench.options import output_options
from epd_portable.bench.sizing import demand as demands
from epd_portable.bench.sizing import report as sizing_report
from epd_portable.bench.sizing import scaling, search, stages
from epd_portable.bench.sizing.measure import MeasuredStages, Probe, analyse
from epd_portable.bench.sizing.simulate import EncoderChoice, RoutingRules
from epd_portable.errors import ConfigError, MeasurementError
from epd_portable.launch.commands.command_line import http_url

F = TypeVar("F", bound=Callable[..., Any])

MOST_DEVICES = 256
"""Of a search, which tries every split."""
SMALLEST_SCALE, LARGEST_SCALE = 2, 20_000

HELP = """Say how many encode and prefill+decode instances to run, and whether to split at all.

A discrete-event simulation of router and instances, from the times that each stage takes on one
device. It tries all ways to use the devices, replicas of one process among them, and finds the
highest rate at which 99 of 100 requests, of those with and without pictures, keep the limits. No
engine is started.

\b
Stage times of an idle server that is up, and the answer for 8 such devices:
  epd-bench plan --measure http://127.0.0.1:8000 --write-stages stages.yaml --devices 8
  epd-bench plan --stages stages.yaml --devices 8 --workload share=0.3,pictures=1+4,size=1024
What to expect at a rate, without a search:
  epd-bench plan --stages stages.yaml --devices 2 --rate 2,6
Where the design saturates:
  epd-bench plan --stages stages.yaml --devices 8 --scale 10,100,1000,10000

\b
--workload has KEY=VALUE with commas between; V+V draws one of these for each request. Defaults:
  share=0.1           part of the requests that have pictures
  pictures=1          pictures in such a request
  size=448            side of a picture in pixels
  text=64             prompt tokens beside pictures
  output=60           tokens of an answer
  picture_bytes=100000  size of a picture's file
  burst=1             arrivals: 1 is a Poisson process, with more they come in bursts

\b
--stages is YAML or JSON; seconds on one device:
  source: one A100, measured on 2026-11-23
  encode:  {base_s: 0.005, per_embedding_s: 0.00004, pixels_per_embedding: 784}
  prefill: {base_s: 0.012, per_token_s: 0.00003}
  decode:  {base_s: 0.012, per_sequence_s: 0.00005}
  front_end: {request_s: 0.002, picture_s: 0.004, pixel_s: 2.0e-8}
More keys, each with a default: transfer, router, engine (epd_portable/bench/sizing/stages.py).

Exit status: 0; 1 when something failed; 2 on bad input. What is assumed, and how far predictions
were off: docs/measurements/2026-11-sizing.md.
"""


def read_rates(context: click.Context, option: click.Parameter, text: str) -> list[float]:
    """Read rates, separated by commas; a callback of click.

    Raises:
        click.BadParameter: One is not a positive number.
    """
    try:
        found = [float(part) for part in text.split(",") if part]
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: expected requests/s, as in 2,6.5") from error
    for rate in found:
        if not 0 < rate < 1e9:
            raise click.BadParameter(f"{rate:g}: expected a rate above 0")
    return found


def read_scale(context: click.Context, option: click.Parameter, text: str) -> list[int]:
    """Read numbers of devices, separated by commas; a callback of click.

    Raises:
        click.BadParameter: One is no number, too small for a split or too large to simulate.
    """
    if not re.fullmatch(r"(\d+(,\d+)*)?", text):
        raise click.BadParameter(f"{text!r}: expected numbers of devices, as in 10,100,1000")
    found = [int(part) for part in text.split(",") if part]
    for devices in found:
        if not SMALLEST_SCALE <= devices <= LARGEST_SCALE:
            raise click.BadParameter(
                f"{devices} devices: expected {SMALLEST_SCALE} to {LARGEST_SCALE}"
            )
    return found


def _stage_options(command: F) -> F:
    file = click.Path(dir_okay=False, path_type=Path)
    for option in (
        click.option(
            "--shares-core",
            is_flag=True,
            help="With --measure: say that its API server and its engine run on the same core.",
        ),
        click.option(
            "--pixels-per-embedding",
            default=784,
            show_default=True,
            type=click.IntRange(min=1),
            help="With --measure: pixels that its model turns into one embedding; 28 × 28 in "
            "Qwen2.5-VL.",
        ),
        click.option(
            "--repeat",
            default=5,
            show_default=True,
            type=click.IntRange(min=1, max=1000),
            help="With --measure: requests for each point; their lower quartile is taken.",
        ),
        click.option("--write-stages", type=file, metavar="FILE", help="Write what was measured."),
        click.option(
            "--measure",
            "url",
            metavar="URL",
            callback=http_url,
            help="Measure the stage times of this server, plain vLLM or a topology, in place of "
            "--stages. It must be idle.",
        ),
        click.option(
            "--stages",
            "stage_file",
            type=file,
            metavar="FILE",
            help="File with stage times; see above.",
        ),
    ):
        command = option(command)
    return command


def _rule_options(command: F) -> F:
    for option in (
        click.option("--seed", default=1, show_default=True, help="Seed of all random numbers."),
        click.option(
            "--requests",
            default=4000,
            show_default=True,
            type=click.IntRange(min=100, max=1_000_000),
            help="Requests of each simulation; the first tenth is warm-up and not counted.",
        ),
        click.option(
            "--elastic",
            "elastic_threshold",
            type=click.FloatRange(min=1),
            metavar="THRESHOLD",
            help="Simulate elastic encoding with this router.elastic_threshold.  [default: none]",
        ),
        click.option(
            "--encoder-choice",
            default=RoutingRules().encoder_choice,
            show_default=True,
            type=click.Choice(get_args(EncoderChoice)),
            help="How an item's encoder is found; the router uses hash.",
        ),
        click.option(
            "--router-workers",
            default=1,
            show_default=True,
            type=click.IntRange(min=1, max=1024),
            help="Processes of the router.",
        ),
    ):
        command = option(command)
    return command


@click.command("plan", help=HELP)
@_stage_options
@click.option(
    "--devices",
    default=8,
    show_default=True,
    type=click.IntRange(min=1, max=MOST_DEVICES),
    help="Devices to use, one for each instance.",
)
@click.option(
    "--workload",
    default="share=0.1",
    show_default=True,
    metavar="KEY=VALUE[,...]",
    help="The traffic; see above.",
)
@click.option(
    "--ttft-p99",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Limit of p99 TTFT, in seconds.",
)
@click.option(
    "--ttft-p99-pictures",
    type=click.FloatRange(min=0, min_open=True),
    help="The same for requests with pictures.  [default: as --ttft-p99]",
)
@click.option(
    "--tpot-p99",
    default=0.05,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Limit of p99 TPOT, in seconds.",
)
@click.option(
    "--rate",
    "rates",
    default="",
    callback=read_rates,
    metavar="RATE[,...]",
    help="Predict latencies at these rates, in requests/s, in place of the search.",
)
@click.option(
    "--scale",
    "sizes",
    default="",
    callback=read_scale,
    metavar="DEVICES[,...]",
    help="Also simulate the best split on these numbers of devices, at rates in proportion.",
)
@click.option(
    "--scale-load",
    default=0.8,
    show_default=True,
    type=click.FloatRange(min=0.01, max=1),
    help="With --scale: load, as a part of the best rate.",
)
@_rule_options
@output_options
def plan_command(
    stage_file: Path | None,
    url: str | None,
    write_stages: Path | None,
    repeat: int,
    pixels_per_embedding: int,
    shares_core: bool,
    devices: int,
    workload: str,
    ttft_p99: float,
    ttft_p99_pictures: float | None,
    tpot_p99: float,
    rates: list[float],
    sizes: list[int],
    scale_load: float,
    router_workers: int,
    encoder_choice: EncoderChoice,
    elastic_threshold: float | None,
    requests: int,
    seed: int,
    json_file: Path | None,
    markdown_file: Path | None,
    png_file: Path | None,
) -> None:
    """Say how many instances of what kind; users read `HELP`."""
    with console.stopping_at_sigterm():
        if png_file is not None:
            chart.require()
        load_before = reports.load_average()
        limits = search.LatencyLimits(
            ttft_s=ttft_p99,
            ttft_pictures_s=ttft_p99_pictures or ttft_p99,
            tpot_s=tpot_p99,
        )
        demand = demands.read_demand(workload)
        if sizes and (rates or devices < SMALLEST_SCALE):
            raise ConfigError(
                f"--scale needs the best split of --devices, of which there are {devices}, and no "
                "--rate; use two devices or more, and ask for rates alone"
            )
        measured = None
        if url is not None and stage_file is None:
            measured = analyse(
                Probe(url, repeat=repeat, report=console.progress).run(),
                shares_core=shares_core,
                pixels_per_embedding=pixels_per_embedding,
                source=f"measured from outside by epd-bench plan --measure, repeat {repeat}",
            )
            _keep(measured, write_stages)
            times = measured.times
        elif stage_file is not None and url is None:
            times = stages.load_stages(stage_file)
        else:
            raise ConfigError(
                "stage times come from --stages FILE or from --measure URL; give one of them"
            )
        question = search.SizingQuestion(
            times=times,
            demand=demand,
            rules=RoutingRules(
                router_workers=router_workers,
                encoder_choice=encoder_choice,
                elastic_threshold=elastic_threshold,
            ),
            count=requests,
            seed=seed,
        )
        answer = _answer(question, limits, measured, devices, rates, sizes, scale_load)
        made = sizing_report.make_report(answer, command=console.command(), load_before=load_before)
        console.finish(made, sizing_report.make_charts(answer), json_file, markdown_file, png_file)


def _keep(measured: MeasuredStages, file: Path | None) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(stages.to_yaml(measured.times), encoding="utf-8")
    except OSError as error:
        raise MeasurementError(f"--write-stages {file}: {error}; name another file") from error


def _answer(
    question: search.SizingQuestion,
    limits: search.LatencyLimits,
    measured: MeasuredStages | None,
    devices: int,
    rates: list[float],
    sizes: list[int],
    scale_load: float,
) -> sizing_report.SizingAnswer:
    predictions = tuple(
        sizing_report.Prediction(
            deployment=deployment, asked=rate, outcome=question.ask(deployment, rate)
        )
        for rate in rates
        for deployment in search.deployments(devices)
    )
    candidates: tuple[search.Candidate, ...] = ()
    study = None
    if not rates:
        candidates = tuple(search.search(question, devices, limits, console.progress))
    if sizes:
        best = max(candidates[1:], key=lambda each: each.rate)
        if not best.rate:
            raise MeasurementError(
                f"--scale: no split of {devices} devices keeps the limits; raise them"
            )
        study = scaling.study(
            question,
            best.deployment,
            limits,
            sizes=sizes,
            rate_per_device=scale_load * best.rate / best.deployment.devices,
            report=console.progress,
        )
    return sizing_report.SizingAnswer(
        question=question,
        limits=limits,
        measured=measured,
        candidates=candidates,
        predictions=predictions,
        study=study,
    )
