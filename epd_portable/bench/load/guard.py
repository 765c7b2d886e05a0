"""Holds the ratios of a run against those of a recorded one: `load --guard`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from epd_portable.errors import ConfigError

GUARDED = ("TTFT p99 of text", "TTFT p50 of pictures", "TPOT p99 of all")
"""Ratios of a summary that are not all noise in a short run."""


def regressions(summary: dict[str, Any], recorded: dict[str, Any], *, worse: float) -> list[str]:
    """Say what has become worse beside the same peers.

    Ratios within a run hold on other machines; so a recorded run guards runs elsewhere.

    Args:
        summary: Of this run, as its JSON has it.
        recorded: Of the recorded run.
        worse: A ratio may be so many times the recorded one.

    Returns:
        One line for each ratio that is worse.

    Raises:
        ConfigError: The runs have no load and side in common.
    """
    found = []
    compared = 0
    for what, now, before in _pairs(summary, recorded):
        compared += 1
        if now > worse * before:
            found.append(f"{what}: {now:.2f} in place of {before:.2f}")
    if not compared:
        raise ConfigError(
            f"--guard: nothing to compare: it has {_loads(recorded)}, and this run "
            f"{_loads(summary)}; give loads and names of sides as its command has them"
        )
    return found


def _pairs(summary: dict[str, Any], recorded: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    for load, point in summary["points"].items():
        ratios = recorded["points"].get(load, {}).get("ratios", {})
        for side in point["ratios"].keys() & ratios.keys():
            for what in GUARDED:
                now, before = (of[side].get(what) for of in (point["ratios"], ratios))
                if now is not None and before is not None:
                    yield f"{load}, {what} by {side}", now["median"], before["median"]


def _loads(summary: dict[str, Any]) -> str:
    return " and ".join(
        f"{load} with {', '.join(point['ratios']) or 'one side'}"
        for load, point in summary["points"].items()
    )
