"""Events of commands that run for a while: a line for people, an object for programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_AtStart = Literal["starting", "waiting", "joined", "ready"]
_OfProcesses = Literal["exited", "terminating", "killing", "recovered", "warning"]
Event = Literal[_AtStart, _OfProcesses, "stopping", "draining", "left", "stopped"]
"""Kinds of events; their meanings are in docs/operations.md."""


@dataclass(frozen=True, slots=True)
class Notice:
    """An event: text for people, and fields for programs."""

    event: Event
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)
