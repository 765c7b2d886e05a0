"""What the commands of ``epd-bench`` say, and where it goes."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from epd_portable.bench import chart, report
from epd_portable.errors import MeasurementError


def finish(
    made: report.Report,
    charts: Sequence[chart.Chart | chart.TimelineChart],
    json_file: Path | None,
    markdown_file: Path | None,
    png_file: Path | None,
) -> None:
    """Print the tables and keep what was asked for.

    Raises:
        MeasurementError: A file cannot be written; the tables have been printed by then.
    """
    click.echo(report.to_markdown(made))
    try:
        report.write(made, json_file=json_file, markdown_file=markdown_file)
        if png_file is not None:
            chart.write_png(charts, png_file)
    except OSError as error:
        raise MeasurementError(f"results cannot be kept: {error}; name another file") from error


def command() -> str:
    """Return the command line of this process, for people to repeat."""
    return shlex.join(["epd-bench", *sys.argv[1:]])


def progress(line: str) -> None:
    """Print a progress line."""
    click.echo(line, err=True)


@contextlib.contextmanager
def stopping_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does: servers under measurement are not left behind."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
