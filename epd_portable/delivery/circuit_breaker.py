"""For how long failed requests keep an instance from getting others, though it is healthy. Pure."""

from __future__ import annotations

FAILURES_UNTIL_EJECTED = 5
"""Failed requests in a row after which an instance gets none for a while."""
FIRST_EJECTION_S = 5.0
LONGEST_EJECTION_S = 60.0


class CircuitBreaker:
    """Failed requests of one instance in a row, and the lengths of its ejections.

    Each ejection lasts twice as long as the one before, unless that is long ago.

    Attributes:
        failures: In a row.
        until: When the last ejection ends, or has ended.
    """

    __slots__ = ("_ejections", "_failed_at", "failures", "until")

    def __init__(self) -> None:
        self.failures = 0
        self.until = 0.0
        self._failed_at = 0.0
        self._ejections = 0

    def count_failure(self, now: float, answered_at: float) -> bool:
        """Count a failure; an answer since the last one starts another row.

        Returns:
            Whether there are enough for an ejection.
        """
        if answered_at > self._failed_at:
            self.failures = 0
        self._failed_at = now
        self.failures += 1
        return self.failures >= FAILURES_UNTIL_EJECTED

    def eject(self, now: float) -> float:
        """Return how long the next ejection lasts, in seconds."""
        if now - self.until > LONGEST_EJECTION_S:
            self._ejections = 0
        for_s = min(FIRST_EJECTION_S * 2.0**self._ejections, LONGEST_EJECTION_S)
        self._ejections += 1
        self.until = now + for_s
        return for_s

    def readmit(self) -> None:
        """End an ejection: one more failure starts another."""
        self.failures = FAILURES_UNTIL_EJECTED - 1
