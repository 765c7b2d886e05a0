"""How fast work ends, as far as it was observed. Times are arguments."""

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

        What is under way counts as ended now: of work that has stalled longer times are told.
        """
        return self._busy_s / (self._ended + 1)

    def see(self, now_s: float, *, busy: bool) -> None:
        """Let time pass.

        Args:
            now_s: Monotonic time.
            busy: Whether there was work since it was last looked at.
        """
        if busy:
            self._busy_s += now_s - self._seen_s
        self._seen_s = now_s

    def end(self) -> None:
        """Count one end, now."""
        self._ended += 1
        if self._busy_s > WINDOW_S:
            self._ended *= WINDOW_S / self._busy_s
            self._busy_s = WINDOW_S
