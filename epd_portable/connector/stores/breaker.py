"""Leaves something alone that does not answer: for longer each time, and asks once in between."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "half_open", "open"]

FIRST_S = 0.5
LONGEST_S = 30.0


class Breaker:
    """A circuit breaker; for several threads.

    ``closed``: everybody may ask. One failure opens it. ``open``: nobody may. ``half_open``: its
    time is over, and one may ask; all may if that goes well, else nobody for twice as long.

    Args:
        first_s: How long it is open at first.
        longest_s: And at most.
        clock: Monotonic seconds.
        chance: Between 0 and 1: many processes should not come back at once.
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
    def state(self) -> State:
        """Which of the three it is."""
        with self._lock:
            if self._until is None:
                return "closed"
            return "half_open" if self._clock() >= self._until else "open"

    def allows(self) -> bool:
        """Tell whether to ask; whoever is told so says how that ended."""
        with self._lock:
            if self._until is None:
                return True
            if self._asking or self._clock() < self._until:
                return False
            self._asking = True
            return True

    def succeeded(self) -> bool:
        """Close it; tell whether it was not."""
        with self._lock:
            was_open = self._until is not None
            self._until, self._open_s, self._asking = None, 0.0, False
            return was_open

    def failed(self) -> bool:
        """Open it, or leave it open for longer; tell whether it was closed."""
        with self._lock:
            was_closed = self._until is None
            if was_closed or self._asking:
                longer = 2 * self._open_s if self._open_s else self._first_s
                self._open_s = min(longer, self._longest_s)
                self._until = self._clock() + self._open_s * (0.75 + 0.5 * self._chance())
            self._asking = False
            return was_closed
