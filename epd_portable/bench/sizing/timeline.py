"""The clock of a simulation, and a server that does one piece of work after the other."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

Process = Iterator[float]
"""What happens to one thing: a generator that yields the times at which it goes on."""


class Timeline:
    """Calls what is due, in the order of its time; of two at the same time the earlier set.

    Attributes:
        now: Seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0

    def at(self, when_s: float, call: Callable[[Any], None], argument: Any) -> None:
        """Schedule a call at a time that has not passed."""
        self._count += 1
        heapq.heappush(self._due, (when_s, self._count, call, argument))

    def start(self, process: Process) -> None:
        """Let a process run up to the time that it yields, and from there on to its end."""
        for when_s in process:
            self.at(when_s, self.start, process)
            return

    def run(self) -> None:
        """Go on until nothing is due."""
        while self._due:
            self.now, _, call, argument = heapq.heappop(self._due)
            call(argument)


class FifoServer:
    """Does one piece of work after the other, in the order in which they came.

    Attributes:
        busy_s: Time of all work, finished or accepted.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._free_at_s = 0.0
        self.busy_s = 0.0

    def accept(self, work_s: float) -> float:
        """Accept a piece of work; return when it is done."""
        self.busy_s += work_s
        self._free_at_s = max(self._timeline.now, self._free_at_s) + work_s
        return self._free_at_s
