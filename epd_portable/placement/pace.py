"""How fast work is done, in time that has some. Times are arguments."""

from __future__ import annotations

WINDOW_S = 10.0
"""Busy time over which it is observed; what is older fades."""


class Pace:
    """Ends of work in busy time: idle time says nothing of how fast work is done."""

    def __init__(self) -> None:
        self._ended = 0.0
        self._busy_s = 0.0
        self._seen_s = 0.0

    @property
    def seconds_each(self) -> float:
        """Busy seconds for each end.

        What is under way counts as ended now: of work that has stalled longer times result.
        """
        return self._busy_s / (self._ended + 1)

    def see(self, now_s: float, *, busy: bool) -> None:
        """Let time pass; ``busy`` says whether there was work since the last call."""
        if busy:
            self._busy_s += now_s - self._seen_s
        self._seen_s = now_s

    def count_end(self) -> None:
        """Count one end, now."""
        self._ended += 1
        if self._busy_s > WINDOW_S:
            self._ended *= WINDOW_S / self._busy_s
            self._busy_s = WINDOW_S
