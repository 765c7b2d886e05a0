"""What a worker reports of a step, as vLLM carries it to the scheduler.

vLLM's ``ECConnectorOutput`` has two sets of names in all versions (0.26 to 0.33).
``finished_sending`` holds the transfers that have ended. ``finished_recving`` is free, because the
scheduler knows of received items before the workers do: it holds all else, each name behind what is
reported of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

Kind = Literal["room", "computed", "copy lost", "copy missing", "encoded", "not encoded"]
"""Of an encode instance: the bytes that its encoder cache may fill, once; the last step that its
device has computed; and what became of copies in host memory (see `HostReport`). Of a PD instance:
items that were encoded beside what a step itself encodes, or could not be."""


def to_names(report: Mapping[Kind, Iterable[str]]) -> set[str]:
    """Return a report as ``finished_recving``."""
    return {f"{kind}: {name}" for kind, names in report.items() for name in names}


def from_names(names: Iterable[str] | None) -> dict[Kind, set[str]]:
    """Return the report that `to_names` wrote."""
    report: dict[Kind, set[str]] = defaultdict(set)
    for each in names or ():
        kind, _, name = each.partition(": ")
        report[kind].add(name)  # type: ignore[index]
    return report
