"""Common parts of the commands of ``epd-bench``: progress, and the destination of results."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from epd_benchmarks import report
from epd_portable.config.secret import make_secret_file
from epd_portable.errors import MeasurementError

_TERMINATED = 143
json_option = click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all figures, a line for each case or turn.",
)


def finish(made: report.Report, json_file: Path | None) -> None:
    """Print the tables and write the requested JSON.

    Raises:
        MeasurementError: It cannot be written; the tables have been printed by then.
    """
    click.echo(report.to_markdown(report.document(made)))
    try:
        report.write(made, json_file)
    except OSError as error:
        raise MeasurementError(f"results cannot be kept: {error}; name another file") from error


def progress(line: str) -> None:
    """Print a progress line."""
    click.echo(line, err=True)


@contextlib.contextmanager
def new_secret() -> Iterator[str]:
    """Yield the path of a secret file, which goes with the block."""
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as folder:
        secret_file = str(Path(folder) / "secret")
        make_secret_file(secret_file)
        yield secret_file


def stop_at_sigterm() -> None:
    """Let SIGTERM end this process as an exception does: what it has started is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
