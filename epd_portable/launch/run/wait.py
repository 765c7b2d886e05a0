"""Waits for others: each has a deadline, and says why it goes on and why it ends."""

from __future__ import annotations

import time

from epd_portable.errors import LaunchError


class Wait:
    """A wait, until its deadline. A refusal that stays one is raised by who is asked.

    Args:
        problem: Beginning of the error, as ``pd-0 is not up at http://10.0.0.1:8000``.
        limit: Key or option of the timeout; empty for none.

    Attributes:
        reason: Cause of the wait, as of the last `go_on`.
    """

    def __init__(self, problem: str, timeout_s: float, *, limit: str = "") -> None:
        self._problem = problem
        self._timeout_s = timeout_s
        self._limit = limit and f" ({limit})"
        self._end_s = time.monotonic() + timeout_s
        self.reason = ""

    def go_on(self, reason: str = "") -> None:
        """Note why it is not over.

        Raises:
            LaunchError: It has lasted too long; ends with the reason.
        """
        self.reason = reason
        if time.monotonic() >= self._end_s:
            end = reason and f": {reason}"
            raise LaunchError(f"{self._problem} after {self._timeout_s:g} s{self._limit}{end}")
