"""The command ``epd-bench plan``."""

from __future__ import annotations

from pathlib import Path

import click

from epd_portable.bench import console
from epd_portable.bench.mix import Mix, checked_mix, describe_keys, read_keys
from epd_portable.bench.sizing.report import make_report
from epd_portable.bench.sizing.search import LatencyLimits, SizingQuestion, search
from epd_portable.bench.sizing.stages import load_stages
from epd_portable.launch.commands.command_line import stopping_at_sigterm

MOST_DEVICES = 256
"""Of a search, which tries every split."""
SEED = 1

HELP = f"""Say how many encode and prefill+decode instances to run, and whether to split at all.

A discrete-event simulation of instances behind a front, from the times that each stage takes on one
device. It tries all ways to use the devices, replicas of one process among them, and finds the
highest rate at which 95 of 100 requests, of those with and without pictures, keep the limits. No
engine is started. The page says what the simulation does not know.

\b
The answer for 8 devices:
  epd-bench plan --stages stages.yaml --devices 8 --workload share=0.3,pictures=1/4,size=1024

\b
Keys of --workload; pictures=1/4 and size=448/1024 draw one of these for each request:
{describe_keys(Mix)}

\b
--stages is YAML or JSON; seconds on one device:
  source: one A100, measured on 2026-11-23
  encode:  {{base_s: 0.005, per_embedding_s: 0.00004, pixels_per_embedding: 784}}
  prefill: {{base_s: 0.012, per_token_s: 0.00003}}
  decode:  {{base_s: 0.012, per_sequence_s: 0.00005}}
  front_end: {{request_s: 0.002, picture_s: 0.004, pixel_s: 2.0e-8}}
More keys, each with a default: transfer, engine (epd_portable/bench/sizing/stages.py). How
to measure them with vLLM's own tools: docs/deploy.md.

Exit status: 0; 1 when something failed; 2 on bad input. What is assumed, and how far predictions
were off: docs/measurements/2026-11-sizing.md.
"""


_FILE = click.Path(dir_okay=False, path_type=Path)
_SECONDS = click.FloatRange(min=0, min_open=True)


@click.command("plan", help=HELP)
@click.option(
    "--stages",
    "stage_file",
    required=True,
    type=_FILE,
    metavar="FILE",
    help="File with stage times; see above.",
)
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
    "--ttft-p95",
    default=1.0,
    show_default=True,
    type=_SECONDS,
    help="Limit of p95 TTFT, in seconds.",
)
@click.option(
    "--ttft-p95-pictures",
    type=_SECONDS,
    help="The same for requests with pictures.  [default: as --ttft-p95]",
)
@click.option(
    "--tpot-p95",
    default=0.05,
    show_default=True,
    type=_SECONDS,
    help="Limit of p95 TPOT, in seconds.",
)
@click.option(
    "--elastic",
    is_flag=True,
    help="Simulate elastic encoding (router.elastic_encode), which topologies have by default.",
)
@click.option(
    "--requests",
    default=4000,
    show_default=True,
    type=click.IntRange(min=100, max=1_000_000),
    help="Requests of each simulation; the first tenth is warm-up and not counted.",
)
@console.json_option
def plan_command(
    stage_file: Path,
    devices: int,
    workload: str,
    ttft_p95: float,
    ttft_p95_pictures: float | None,
    tpot_p95: float,
    elastic: bool,
    requests: int,
    json_file: Path | None,
) -> None:
    """Say how many instances of what kind; users read `HELP`."""
    with stopping_at_sigterm():
        limits = LatencyLimits(
            ttft_s=ttft_p95,
            ttft_pictures_s=ttft_p95_pictures or ttft_p95,
            tpot_s=tpot_p95,
        )
        keys = read_keys("--workload", workload, Mix)
        question = SizingQuestion(
            times=load_stages(stage_file),
            workload=checked_mix("--workload", workload, Mix, keys),
            elastic=elastic,
            count=requests,
            seed=SEED,
        )
        found = search(question, devices, limits)
        console.finish(make_report(question, limits, found), json_file)
