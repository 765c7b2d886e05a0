"""What commands that stay tell while they do: a line for people, an object for programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Event = Literal[
    "starting",
    "stage",
    "waiting",
    "ready",
    "exited",
    "ending",
    "killing",
    "back",
    "updating",
    "cutting",
    "updated",
    "update_failed",
    "update_refused",
    "warning",
    "stopping",
    "draining",
    "stopped",
    "joined",
    "away",
    "joined_again",
    "left",
]
"""What can happen, in a word for programs; docs/operations.md says what each means."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that happened.

    Attributes:
        event: What it is.
        text: For people, in a line or, where there is more to say, in several.
        fields: Beside the text for programs: plain JSON values.
    """

    event: Event
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """What people read of it."""
        return f"warning: {self.text}" if self.event == "warning" else self.text
