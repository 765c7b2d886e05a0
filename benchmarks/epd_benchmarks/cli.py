"""The command ``epd-bench``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from epd_benchmarks import report, step, transfer
from epd_benchmarks.load.command import load_command
from epd_benchmarks.stand_in import TOKEN_BYTES
from epd_portable.config.instance import PATH_NAMES, PLATFORMS
from epd_portable.config.quantities import parse_size
from epd_portable.launch.commands.command_line import CommandLine
from epd_portable.platforms import registry

DEFAULT_SIZES = ("4KiB", "64KiB", "1MiB", "4MiB", "16MiB", "64MiB")

HELP = """Measure transfers, serving and engine steps, each with a baseline in the same run.

A topology under load, with replicas of plain vLLM as baseline:
  epd-bench load --side ours=configs/1e1pd.yaml --side replicas:2 --point rate=2/6
Time of a transfer of an encoder output, by path and size, against memcpy:
  epd-bench transfer --platform npu
Cost of this package in every step of a prefill+decode engine:
  epd-bench step
Results of an earlier run:
  epd-bench show benchmarks/results/load-tuned.json

Tables go to standard output, progress to standard error, samples to the file of --json.
"""

main = CommandLine(name="epd-bench", help=HELP, json_errors=False)
main.add_command(load_command)


def read_sizes(context: click.Context, option: click.Parameter, texts: Sequence[str]) -> list[int]:
    """Return sizes of items, for click; `click.BadParameter` if one has a part of an embedding."""
    try:
        sizes = [int(parse_size(text)) for text in texts]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    for nbytes in sizes:
        if nbytes <= 0 or nbytes % TOKEN_BYTES:
            raise click.BadParameter(f"{nbytes} is not a positive multiple of {TOKEN_BYTES} bytes")
    return list(dict.fromkeys(sizes))


@main.command("transfer")
@click.option(
    "--platform",
    default="cpu",
    type=click.Choice(PLATFORMS),
    help="Platform of both ends; each takes a device where there are two.",
)
@click.option(
    "--path",
    "paths",
    multiple=True,
    show_default="all that the platform has",
    type=click.Choice(PATH_NAMES),
    help="Transfer path; may be repeated.",
)
@click.option(
    "--bytes",
    "sizes",
    multiple=True,
    default=DEFAULT_SIZES,
    callback=read_sizes,
    metavar="SIZE",
    help="Size of an item, as in 64KiB; may be repeated.",
)
@click.option("--repeat", default=50, type=click.IntRange(min=1), help="Measured rounds.")
@report.json_option
def transfer_command(
    platform: str,
    paths: tuple[str, ...],
    sizes: list[int],
    repeat: int,
    json_file: Path | None,
) -> None:
    """Measure transfers: from the encoder's output to the tensor at the consumer.

    A real sender and a real receiver in processes of their own, no engine; all bytes are checked.
    Each round moves an item twice: with its output 10 ms after the announcement, and at once.

      epd-bench transfer --path shm --path tcp --bytes 1MiB --bytes 64MiB --json t.json

    Exit status: 0; 1 when something failed; 2 on bad input.
    """
    report.stop_at_sigterm()
    found = registry.get(platform)
    devices = found.device_count()
    where = ("both ends on device 0, the only one", "producer on device 0, consumer on device 1")
    ends = where[devices > 1] if found.traits.needs_device_copy else "both ends on its cores"
    place = f"Platform {platform} ({found.availability().reason}): {ends}."
    chosen, left_out = transfer.choose_paths(paths, platform, devices)
    samples = transfer.measure(chosen, sizes, platform, devices=devices, repeat=repeat)
    report.finish(transfer.make_report(samples, place, left_out), json_file)


@main.command("step")
@click.option(
    "--steps",
    default=1000,
    type=click.IntRange(min=10),
    help="Measured steps of each combination.",
)
@report.json_option
def step_command(steps: int, json_file: Path | None) -> None:
    """Measure what the package adds to a step of a prefill+decode engine.

    Its bookkeeping alone, of 256 requests that decode, with 1 and 32 items each, while 0, 100 and
    1,000 more wait for an item; no engine, no model.

      epd-bench step --json s.json

    Exit status: 0; 1 when something failed; 2 on bad input.
    """
    report.stop_at_sigterm()
    report.finish(step.make_report(step.measure(steps)), json_file)


@main.command("show")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def show_command(file: Path) -> None:
    """Print the tables of a results file, under the command, commit and machine of the run."""
    click.echo(report.to_markdown(json.loads(file.read_text("utf-8"))))


if __name__ == "__main__":
    main()
