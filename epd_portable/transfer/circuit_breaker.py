"""A circuit breaker with exponential back-off, of a store."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

BreakerState = Literal["closed", "half_open", "open"]

FIRST_S = 0.5
LONGEST_S = 30.0
_JITTER = 0.25


@dataclass(eq=False, kw_only=True)
class CircuitBreaker:
    """A circuit breaker; for several threads.

    ``closed``: calls are allowed; a failure opens it. ``open``: none is.
    ``half_open``: the time is over, and one call is allowed: it closes the breaker, or opens it
    again. Each opening lasts twice as long as the one before, from ``first_s`` to ``longest_s``,
    and as short as the first if that one ended more than ``longest_s`` ago.

    Attributes:
        chance: Returns a number from 0 to 1, for jitter of a quarter; 0.5 for none.
    """

    first_s: float = FIRST_S
    longest_s: float = LONGEST_S
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        self._until = -math.inf
        self._lock = threading.Lock()
        self._next_s = self.first_s
        self._is_open = self._asking = False

    @property
    def state(self) -> BreakerState:
        """Return its state."""
        with self._lock:
            if not self._is_open:
                return "closed"
            return "half_open" if self.clock() >= self._until else "open"

    def allows(self) -> bool:
        """Return whether a call is allowed; the caller reports by `close` or `failed`."""
        with self._lock:
            if not self._is_open:
                return True
            if self._asking or self.clock() < self._until:
                return False
            self._asking = True
            return True

    def close(self) -> bool:
        """Allow calls, because one has succeeded; return whether it was not closed."""
        with self._lock:
            was_open = self._is_open
            self._is_open = self._asking = False
            return was_open

    def failed(self) -> bool:
        """Open it, or open it again, because one has failed; return whether it was closed."""
        with self._lock:
            was_closed = not self._is_open
            if was_closed or self._asking:
                self._open()
            self._asking = False
            return was_closed

    def _open(self) -> None:
        now = self.clock()
        if now - self._until > self.longest_s:
            self._next_s = self.first_s
        self._until = now + self._next_s * (1 - _JITTER + 2 * _JITTER * self.chance())
        self._next_s = min(2 * self._next_s, self.longest_s)
        self._is_open = True
