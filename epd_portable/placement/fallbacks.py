"""How often requests and jobs may be sent again."""

from __future__ import annotations

MAX_PD_ATTEMPTS = 2
"""Times that one request is sent: one that kills its instance must not walk over them all."""
JOB_GRACE_S = 2.0
"""Encode jobs may still be answered for this long when nothing waits for them any more."""
MAX_PREFILLS = 2
"""Prefill instances asked for one request, before the decode instance prefills itself."""
RETRIES_AT_ONCE = 100
REQUESTS_PER_RETRY = 5
"""Requests and jobs may be sent again that often: some at once, and then a part of what comes, so
that a failing topology does not get twice the work."""


class RetryBudget:
    """How often something may be sent again."""

    def __init__(self) -> None:
        self._requests = RETRIES_AT_ONCE * REQUESTS_PER_RETRY

    def count_request(self) -> None:
        """Count a request: for several of them, something may be sent again."""
        self._requests = min(self._requests + 1, RETRIES_AT_ONCE * REQUESTS_PER_RETRY)

    def spend(self) -> bool:
        """Return whether one more may be sent again, and count it."""
        if self._requests < REQUESTS_PER_RETRY:
            return False
        self._requests -= REQUESTS_PER_RETRY
        return True
