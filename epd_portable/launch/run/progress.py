"""What a user is told while a topology starts. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from epd_portable.launch.notices import Notice
from epd_portable.launch.run.logs import FIRST_STAGE


class Progress:
    """Turns stages of processes into notices: one a change, and one when nothing changes.

    Args:
        started_at: Time of the start.
        quiet_s: Longest silence.
    """

    def __init__(self, *, started_at: float, quiet_s: float = 10.0) -> None:
        self._started_at = started_at
        self._quiet_s = quiet_s
        self._said_at = started_at
        self._stages: dict[str, str] = {}

    def notices(self, stages: Mapping[str, str], now: float) -> list[Notice]:
        """Return what to tell.

        Args:
            stages: How far each process is, in words.
            now: Time.
        """
        elapsed_s = now - self._started_at
        clock = f"{elapsed_s:3.0f} s"
        told = {"elapsed_s": round(elapsed_s, 1)}
        notices = [
            Notice("stage", f"{clock}  {name}: {stage}", {"instance": name, "stage": stage, **told})
            for name, stage in stages.items()
            if stage != self._stages.get(name, FIRST_STAGE)
        ]
        self._stages = dict(stages)
        if not notices and now - self._said_at >= self._quiet_s:
            waiting = ", ".join(f"{name} ({stage})" for name, stage in stages.items())
            text = f"{clock}  still waiting for {waiting}"
            notices = [Notice("waiting", text, {"stages": self._stages, **told})]
        if notices:
            self._said_at = now
        return notices
