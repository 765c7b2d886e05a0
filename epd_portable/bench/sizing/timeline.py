"""The clock of a simulation, and whatever does one piece of work after the other."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class EngineTimeline:
    """Calls what is due, in the order of its time; of two at the same time the earlier set.

    Attributes:
        now: Seconds since the beginning.
        events: Calls so far.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._due: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._set = 0

    def at(self, when_s: float, call: Callable[[Any], None], argument: Any) -> None:
        """Let something happen at a time that has not passed."""
        self._set += 1
        heapq.heappush(self._due, (when_s, self._set, call, argument))

    def run(self) -> None:
        """Go on until nothing is due."""
        due = self._due
        while due:
            self.now, _, call, argument = heapq.heappop(due)
            self.events += 1
            call(argument)


class FifoServer:
    """Does one piece of work after the other, in the order in which they came.

    Attributes:
        busy_s: Work so far, finished or accepted.
        waited_s: What pieces waited for their turn, together.
        served: How many there were.
        longest_wait_s: Of one of them.
    """

    def __init__(self, timeline: EngineTimeline) -> None:
        self._timeline = timeline
        self._free_at_s = 0.0
        self.busy_s = 0.0
        self.waited_s = 0.0
        self.served = 0
        self.longest_wait_s = 0.0

    @property
    def backlog_s(self) -> float:
        """Time until a piece of work that comes now would begin."""
        return max(0.0, self._free_at_s - self._timeline.now)

    def serve(self, work_s: float, then: Callable[[Any], None], argument: Any) -> None:
        """Accept a piece of work; call ``then`` when it is done."""
        wait_s = self.backlog_s
        self._free_at_s = self._timeline.now + wait_s + work_s
        self.busy_s += work_s
        self.waited_s += wait_s
        self.served += 1
        self.longest_wait_s = max(self.longest_wait_s, wait_s)
        self._timeline.at(self._free_at_s, then, argument)
