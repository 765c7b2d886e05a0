"""The command ``epd-bench``."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from epd_portable.bench import chart, report, transfer, transfer_report
from epd_portable.bench.commands import TOKEN_BYTES
from epd_portable.config.schema import parse_size
from epd_portable.connector import registry
from epd_portable.errors import ConfigError, EPDError

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_SIZES = ("4KiB", "64KiB", "1MiB", "4MiB", "16MiB", "64MiB")


class _Size(click.ParamType[int]):
    """Bytes, with a binary unit if wanted."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            nbytes = int(parse_size(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if nbytes <= 0 or nbytes % TOKEN_BYTES:
            self.fail(
                f"{value!r} is not a positive multiple of {TOKEN_BYTES} bytes: items are made of "
                f"embeddings of that size; try {max(1, round(nbytes / TOKEN_BYTES)) * 4}KiB",
                param,
                ctx,
            )
        return nbytes


def _output_options(command: F) -> F:
    file = click.Path(dir_okay=False, path_type=Path)
    options = [
        click.option("--json", "json_file", type=file, help="Write every sample and a summary."),
        click.option("--markdown", "markdown_file", type=file, help="Write the tables."),
        click.option("--png", "png_file", type=file, help="Draw them; needs the extra 'bench'."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group(no_args_is_help=True, context_settings={"max_content_width": 100})
@click.version_option(package_name="epd-portable")
def main() -> None:
    r"""Measure transfers and serving, each next to a peer in the same run.

    \b
    How long an encoder output takes to the other instance, by path and size, against memcpy:
      epd-bench transfer
      epd-bench transfer --path shm --bytes 64KiB --bytes 16MiB --repeat 200
    Keep the figures:
      epd-bench transfer --json t.json --markdown t.md --png t.png

    Tables go to standard output, progress to standard error. Ratios come first in every table:
    they hold on other machines better than times do.
    """


@main.command("transfer")
@click.option(
    "--path",
    "paths",
    multiple=True,
    default=[entry.name for entry in registry.PATHS],
    show_default=True,
    type=click.Choice([entry.name for entry in registry.PATHS]),
    help="Transfer path; may be repeated.",
)
@click.option(
    "--bytes",
    "sizes",
    multiple=True,
    default=DEFAULT_SIZES,
    show_default=True,
    type=_Size(),
    metavar="SIZE",
    help="Size of an item; may be repeated.",
)
@click.option(
    "--repeat",
    default=50,
    show_default=True,
    type=click.IntRange(min=1),
    help="Measured rounds; each moves one item of every size by every path.",
)
@click.option(
    "--encode-ms",
    default=10.0,
    show_default=True,
    type=click.FloatRange(min=0, max=10_000),
    help="Time from the order of an item to its output. 0 puts the wait for the grant on the way.",
)
@_output_options
def transfer_command(
    paths: tuple[str, ...],
    sizes: tuple[int, ...],
    repeat: int,
    encode_ms: float,
    json_file: Path | None,
    markdown_file: Path | None,
    png_file: Path | None,
) -> None:
    """Measure from the encoder's output to the placed tensor, by path and size.

    A real sender and a real receiver in processes of their own on the CPU, no engine. Every
    content is checked on arrival. Exit status: 0, 1 when something failed, 2 on bad input.
    """
    with _messages():
        if png_file is not None:
            chart.require()
        load_before = report.load_average()
        cases = [
            transfer.Case(path=path, nbytes=nbytes)
            for nbytes in dict.fromkeys(sizes)
            for path in dict.fromkeys(paths)
        ]
        samples = transfer.measure(
            cases, repeat=repeat, encode_s=encode_ms / 1000, report=_progress
        )
        made = transfer_report.make_report(
            samples, command=_command(), encode_s=encode_ms / 1000, load_before=load_before
        )
        _finish(made, [transfer_report.make_chart(samples)], json_file, markdown_file, png_file)


def _finish(
    made: report.Report,
    charts: list[chart.Chart],
    json_file: Path | None,
    markdown_file: Path | None,
    png_file: Path | None,
) -> None:
    report.write(made, json_file=json_file, markdown_file=markdown_file)
    if png_file is not None:
        chart.write_png(charts, png_file)
    click.echo(report.to_markdown(made))


def _command() -> str:
    return shlex.join(["epd-bench", *sys.argv[1:]])


def _progress(line: str) -> None:
    click.echo(line, err=True)


@contextlib.contextmanager
def _messages() -> Iterator[None]:
    """Turn errors raised on purpose into one message and an exit status."""
    try:
        yield
    except ConfigError as error:
        click.echo(f"epd-bench: {error}", err=True)
        sys.exit(2)
    except EPDError as error:
        click.echo(f"epd-bench: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
