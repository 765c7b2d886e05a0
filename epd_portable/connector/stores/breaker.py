"""A circuit breaker with exponential back-off."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Literal

BreakerState = Literal["closed", "half_open", "open"]

FIRST_S = 0.5
LONGEST_S = 30.0


class Breaker:
    """A circuit breaker; for several threads.

    ``closed``: calls are allowed; one failure opens it. ``open``: none is. ``half_open``: the time
    is over, and one call is allowed: it closes the breaker, or opens it for twice as long, from
    ``first_s`` to ``longest_s``. ``chance`` returns a number from 0 to 1, for jitter.
    """

    def __init__(
        self,
        *,
        first_s: float = FIRST_S,
        longest_s: float = LONGEST_S,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._open_s = 0.0
        self._until: float | None = None
        self._asking = False

    @property
    def state(self) -> BreakerState:
        """Its state."""
        with self._lock:
            if self._until is None:
                return "closed"
            return "half_open" if self._clock() >= self._until else "open"

    def allows(self) -> bool:
        """Return whether a call is allowed; the caller reports `succeeded` or `failed`."""
        with self._lock:
            if self._until is None:
                return True
            if self._asking or self._clock() < self._until:
                return False
            self._asking = True
            return True

    def succeeded(self) -> bool:
        """Close it; return whether it was not closed."""
        with self._lock:
            was_open = self._until is not None
            self._until, self._open_s, self._asking = None, 0.0, False
            return was_open

    def failed(self) -> bool:
        """Open it, or keep it open for longer; return whether it was closed."""
        with self._lock:
            was_closed = self._until is None
            if was_closed or self._asking:
                longer = 2 * self._open_s if self._open_s else self._first_s
                self._open_s = min(longer, self._longest_s)
                self._until = self._clock() + self._open_s * (0.75 + 0.5 * self._chance())
            self._asking = False
            return was_closed
