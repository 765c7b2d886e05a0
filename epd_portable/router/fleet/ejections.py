"""For how long failed requests keep an instance from getting others, though it is healthy. Pure."""

from __future__ import annotations

FAILURES_UNTIL_EJECTED = 5
"""Failed requests in a row after which an instance gets none for a while."""
FIRST_EJECTION_S = 5.0
LONGEST_EJECTION_S = 60.0


class Ejections:
    """The failed requests of one instance, and its ejections, each longer than the one before.

    Attributes:
        failures: In a row.
        until: When the last ejection ends, or has ended.
    """

    __slots__ = ("_before", "_failed_at", "failures", "until")

    def __init__(self) -> None:
        self.failures = 0
        self.until = 0.0
        self._failed_at = 0.0
        self._before = 0

    @property
    def due(self) -> bool:
        """Whether there are failures enough for another one."""
        return self.failures >= FAILURES_UNTIL_EJECTED

    def fail(self, now: float, answered_at: float) -> None:
        """Count a failure; an answer since the last one begins another row."""
        if answered_at > self._failed_at:
            self.failures = 0
        self._failed_at = now
        self.failures += 1

    def begin(self, now: float) -> float:
        """Return how long the next ejection lasts, in seconds."""
        if now - self.until > LONGEST_EJECTION_S:
            self._before = 0
        for_s = min(FIRST_EJECTION_S * 2.0**self._before, LONGEST_EJECTION_S)
        self._before += 1
        self.until = now + for_s
        return for_s

    def end(self) -> None:
        """End an ejection: one more failure begins another."""
        self.failures = FAILURES_UNTIL_EJECTED - 1
