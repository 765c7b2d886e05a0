"""Events of commands that run for a while: a line for people, an object for programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Event = Literal[
    "starting",
    "stage",
    "waiting",
    "joined",
    "ready",
    "exited",
    "ending",
    "killing",
    "back",
    "warning",
    "stopping",
    "draining",
    "left",
    "stopped",
]
"""What can happen; docs/operations.md says what each means."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that happened.

    Attributes:
        text: For people, in one or several lines.
        fields: For programs, beside the text: plain JSON values.
    """

    event: Event
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)
