"""The lines that a user reads while a topology starts. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from epd_portable.launch.logs import FIRST_STAGE


class Progress:
    """Turns stages of processes into lines: one for each change, and one when nothing changes.

    Args:
        started_at: Time of the start.
        quiet_s: Longest silence.
    """

    def __init__(self, *, started_at: float, quiet_s: float = 10.0) -> None:
        self._started_at = started_at
        self._quiet_s = quiet_s
        self._said_at = started_at
        self._stages: dict[str, str] = {}

    def lines(self, stages: Mapping[str, str], now: float) -> list[str]:
        """Return what to print.

        Args:
            stages: How far each process is, in words.
            now: Time.
        """
        elapsed = f"{now - self._started_at:3.0f} s"
        lines = [
            f"{elapsed}  {name}: {stage}"
            for name, stage in stages.items()
            if stage != self._stages.get(name, FIRST_STAGE)
        ]
        self._stages = dict(stages)
        if not lines and now - self._said_at >= self._quiet_s:
            waiting = ", ".join(f"{name} ({stage})" for name, stage in stages.items())
            lines = [f"{elapsed}  still waiting for {waiting}"]
        if lines:
            self._said_at = now
        return lines
