"""The command ``epd-bench``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from epd_portable.bench import (
    chart,
    console,
    report,
    step,
    transfer,
    transfer_report,
)
from epd_portable.bench.load.command import load_command
from epd_portable.bench.options import (
    choose_paths,
    file_options,
    output_options,
    read_sizes,
)
from epd_portable.bench.router import measure as router_measure
from epd_portable.bench.router import report as router_report
from epd_portable.bench.router import stage as router_stage
from epd_portable.bench.sizing.command import plan_command
from epd_portable.bench.store_command import store_command
from epd_portable.config.extensions import BUILT_IN_PATHS
from epd_portable.config.instance import PlatformName
from epd_portable.errors import MeasurementError
from epd_portable.launch.commands.command_line import JsonFileCommandLine
from epd_portable.launch.commands.options import PlatformType

DEFAULT_SIZES = ("4KiB", "64KiB", "1MiB", "4MiB", "16MiB", "64MiB")


HELP = """Measure transfers, serving and the router, each beside a baseline in the same run.

\b
A topology under load, beside replicas of plain vLLM and vLLM's own example (upstream):
  epd-bench load --side ours=configs/1e1pd.yaml --side replicas:2 --side upstream:1E1PD \\
    --model shape --rate 2,6,10 --share 0.1
Where the time of single requests goes, beside plain vLLM in one process:
  epd-bench load --side configs/1e1pd.yaml --side replicas:1 --preset one-by-one
What transfer.media=metadata saves:
  epd-bench load --side meta=configs/1e1pd.yaml,transfer.media=metadata \\
    --side media=configs/1e1pd.yaml --rate 2
How long a transfer of an encoder output takes, by path and size, against memcpy:
  epd-bench transfer
  epd-bench transfer --path shm --bytes 64KiB --bytes 16MiB --repeat 200
  epd-bench transfer --platform npu
What this package costs a prefill+decode engine in every step:
  epd-bench step
  epd-bench step --decoding 256 --items 32 --waiting 1000
How long a load of an encoder output from a store takes, beside encoding it:
  epd-bench store
  epd-bench store --config configs/1e1pd.yaml --model shape
What the router costs, beside a proxy and beside another version of itself:
  epd-bench router --quick
  epd-bench router --side before=../old --side after=. --case text --case stream
How many instances of which role to run, and whether to split at all, by simulation:
  epd-bench plan --stages stages.yaml --devices 8 --workload share=0.3,pictures=1+4
  epd-bench plan --measure http://127.0.0.1:8000 --write-stages stages.yaml
Write the results to files:
  epd-bench transfer --json t.json --markdown t.md --png t.png

Tables go to standard output, progress to standard error. Every table has ratios first:
they carry over to other machines better than times.
"""
"""The page of ``epd-bench --help``; a line of ``\\b`` keeps the lines of its paragraph."""


MEANT = {
    **dict.fromkeys(("serve", "serving", "throughput", "latency"), "`load` measures serving"),
    **dict.fromkeys(("size", "sizing", "simulate"), "`plan` says how many instances to run"),
    "transport": "`transfer` measures paths between instances",
}
"""What users of other programs may ask for, and what it is here."""

main = JsonFileCommandLine(name="epd-bench", help=HELP, meant=MEANT)
"""The command ``epd-bench``."""


main.add_command(load_command)
main.add_command(plan_command)
main.add_command(store_command)


TRANSFER_HELP = """Measure transfers: from the encoder's output to the tensor at the consumer.

A real sender and a real receiver in processes of their own, no engine. All bytes are checked on
arrival.

\b
  epd-bench transfer --path shm --path tcp --bytes 1MiB --bytes 64MiB --json t.json

Exit status: 0; 1 when something failed; 2 on bad input.
"""


@main.command("transfer", help=TRANSFER_HELP)
@click.option(
    "--platform",
    default="cpu",
    show_default=True,
    type=PlatformType(),
    help="Platform of both ends; each takes a device where there are two.",
)
@click.option(
    "--path",
    "paths",
    multiple=True,
    show_default="all that the platform has",
    type=click.Choice(BUILT_IN_PATHS),
    help="Transfer path; may be repeated.",
)
@click.option(
    "--bytes",
    "sizes",
    multiple=True,
    default=DEFAULT_SIZES,
    show_default=True,
    callback=read_sizes,
    metavar="SIZE",
    help="Size of an item, as in 64KiB; may be repeated.",
)
@click.option(
    "--repeat",
    default=50,
    show_default=True,
    type=click.IntRange(min=1),
    help="Measured rounds; each moves one item for every path, size and --encode-ms.",
)
@click.option(
    "--encode-ms",
    multiple=True,
    default=(10.0, 0.0),
    show_default=True,
    type=click.FloatRange(min=0, max=10_000),
    help="Milliseconds from the announcement of an item to its output, as an encoder would take; "
    "may be repeated. With 0 the transfer includes the wait for the grant.",
)
@output_options
def transfer_command(
    platform: PlatformName,
    paths: tuple[str, ...],
    sizes: list[int],
    repeat: int,
    encode_ms: tuple[float, ...],
    json_file: Path | None,
    markdown_file: Path | None,
    png_file: Path | None,
) -> None:
    """Measure transfers; users read `TRANSFER_HELP`."""
    with console.stopping_at_sigterm():
        if png_file is not None:
            chart.require()
        load_before = report.load_average()
        place = transfer.find(platform)
        chosen, left_out = choose_paths(paths, platform, place.devices)
        cases = [
            transfer.TransferCase(path=path, nbytes=nbytes, encode_s=each / 1000)
            for each in dict.fromkeys(encode_ms)
            for nbytes in sizes
            for path in chosen
        ]
        samples = transfer.measure(cases, place, repeat=repeat, report=console.progress)
        made = transfer_report.make_report(
            samples,
            place,
            left_out=left_out,
            command=console.command(),
            load_before=load_before,
        )
        console.finish(
            made, [transfer_report.make_chart(samples)], json_file, markdown_file, png_file
        )


STEP_HELP = """Measure what the package adds to a step of a prefill+decode engine.

Its bookkeeping alone, for given numbers of requests; no engine, no model.

\b
  epd-bench step --decoding 256 --items 32 --waiting 1000

Exit status: 0; 1 when something failed; 2 on bad input.
"""


@main.command("step", help=STEP_HELP)
@click.option(
    "--decoding",
    multiple=True,
    default=(256,),
    show_default=True,
    type=click.IntRange(min=1, max=4096),
    help="Running requests, which decode; may be repeated.",
)
@click.option(
    "--items",
    multiple=True,
    default=(1, 32),
    show_default=True,
    type=click.IntRange(min=1, max=64),
    help="Items in the prompt of each of them; may be repeated.",
)
@click.option(
    "--waiting",
    multiple=True,
    default=(0, 100, 1000),
    show_default=True,
    type=click.IntRange(min=0, max=100_000),
    help="Requests that wait for an item; may be repeated.",
)
@click.option(
    "--steps",
    default=1000,
    show_default=True,
    type=click.IntRange(min=10),
    help="Measured steps of each combination.",
)
@file_options
def step_command(
    decoding: tuple[int, ...],
    items: tuple[int, ...],
    waiting: tuple[int, ...],
    steps: int,
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Measure steps; users read `STEP_HELP`."""
    with console.stopping_at_sigterm():
        load_before = report.load_average()
        cases = [
            step.StepCase(decoding=running, items=each, waiting=behind)
            for running in decoding
            for each in items
            for behind in waiting
        ]
        samples = step.measure(cases, steps=steps, report=console.progress)
        made = step.make_report(samples, command=console.command(), load_before=load_before)
        console.finish(made, [], json_file, markdown_file, None)


ROUTER_HELP = """Measure what the router costs, between clients and simulated instances.

The router has a core to itself and gets requests over HTTP; the instances answer at once and
compute nothing. Baselines, in turns with it: a stand-in for the proxy of vLLM's example for
disaggregated encoders, and an instance that is asked directly. Every answer is checked. About nine
minutes, with --quick three.

\b
Cases:
{cases}

CPU times are valid on a busy machine too, rates and latencies only on an idle one.

Exit status: 0, 1 when something failed, 2 on bad input.
"""


@main.command(
    "router",
    help=ROUTER_HELP.format(
        cases="\n".join(
            f"  {case.name:8} {case.about}" for case in router_measure.ALL_CASES.values()
        )
    ),
)
@click.option(
    "--side",
    "sides",
    multiple=True,
    metavar="NAME=PATH",
    show_default="this package's own router",
    help="A router to measure: a checkout, the folder that holds epd_portable; may be repeated, "
    "and later ones are compared with the first.",
)
@click.option(
    "--case",
    "names",
    multiple=True,
    show_default="all",
    type=click.Choice(list(router_measure.ALL_CASES)),
    help="What to measure; may be repeated.",
)
@click.option("--quick", is_flag=True, help="One short round instead of three.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1, max=100),
    show_default="3, with --quick 1",
    help="Rounds of every side in every case; some cases always take one.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.2, max=600),
    show_default="3, with --quick 1.5",
    help="Seconds of each load in a round.",
)
@click.option("--no-proxy", is_flag=True, help="Leave the proxy out.")
@file_options
def router_command(
    sides: tuple[str, ...],
    names: tuple[str, ...],
    quick: bool,
    rounds: int | None,
    seconds: float | None,
    no_proxy: bool,
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Measure what the router costs; users read `ROUTER_HELP`."""
    with console.stopping_at_sigterm():
        load_before = report.load_average()
        usual = router_stage.QUICK if quick else router_stage.FULL
        results = router_measure.measure(
            [case for name, case in router_measure.ALL_CASES.items() if not names or name in names],
            [*router_measure.read_sides(sides), *router_measure.peers(proxy=not no_proxy)],
            dataclasses.replace(
                usual, rounds=rounds or usual.rounds, window_s=seconds or usual.window_s
            ),
            report=console.progress,
        )
        made = router_report.make_report(
            results, command=console.command(), load_before=load_before
        )
        console.finish(made, [], json_file, markdown_file, None)
        if results.failed:
            failed = ", ".join(f"{case} of {side}" for case, side in results.failed)
            raise MeasurementError(f"not measured: {failed}; the notes above say why")


if __name__ == "__main__":
    main()
