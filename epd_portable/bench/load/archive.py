"""Finished rounds, kept in the JSON of a report, so that a measurement can go on later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from epd_portable.bench.load.record import SideTurn
from epd_portable.errors import ConfigError


def read_turns(path: Path, fingerprint: str) -> tuple[list[SideTurn], float | None]:
    """Return the turns of a file, and the words per token with which they were asked.

    Args:
        path: Written by `epd_portable.bench.report.write`; nothing if it is not there.
        fingerprint: Of the measurement that wants to go on.

    Raises:
        ConfigError: The file is none of this command, or its requests were others.
    """
    if not path.exists():
        return [], None
    whole = read_page(path)
    found = whole["summary"].get("fingerprint")
    if found != fingerprint:
        raise ConfigError(
            f"--resume {path}: its requests, sides or settings were others (fingerprint {found}, "
            f"here {fingerprint}); its command was: {whole['command']} – name another --json, or "
            "give the same options"
        )
    turns = msgspec.convert(whole["samples"], list[SideTurn])
    return turns, whole["summary"]["words_per_token"]


def read_page(path: Path) -> dict[str, Any]:
    """Read the JSON of a measurement of load.

    Raises:
        ConfigError: It is none.
    """
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(whole, dict) or "fingerprint" not in (whole.get("summary") or {}):
        raise ConfigError(f"{path}: no results of epd-bench load")
    return whole
