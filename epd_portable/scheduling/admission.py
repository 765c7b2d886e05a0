"""How much an encode instance takes on at once, and when it has room again.

Requests are counted by their items and by the bytes of their bodies, from their arrival to the end
of their answers. Times are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 10.0
"""Busy time over which the rate of answers is observed; what is older fades."""

SHORTEST_WAIT_S = 0.05
LONGEST_WAIT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionLimits:
    """What may be queued at once.

    Attributes:
        items: Media items of all requests; a request without any counts as one.
        nbytes: Bodies of all requests.
    """

    items: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a request is not taken on.

    Attributes:
        what: ``items`` or ``bytes``.
        wanted: Of the request.
        queued: Of the others.
        limit: For all.
        wait_s: After this time there is probably room; ``None`` if the request alone is too large.
    """

    what: str
    wanted: int
    queued: int
    limit: int
    wait_s: float | None


@dataclass(slots=True)
class Visit:
    """What one request occupies.

    Attributes:
        items: Of it that were taken.
        nbytes: Of it that were taken.
    """

    items: int = 0
    nbytes: int = 0


class Admission:
    """Counts what is queued; says no instead of growing.

    Args:
        limits: That are never exceeded.

    Attributes:
        items: Queued at the moment.
        nbytes: Queued at the moment.
        requests: Queued at the moment.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self.items = 0
        self.nbytes = 0
        self.requests = 0
        self._answered = 0.0
        self._busy_s = 0.0
        self._seen_s = 0.0

    def take(
        self, visit: Visit, *, items: int = 0, nbytes: int = 0, now_s: float
    ) -> Refusal | None:
        """Count more of a request; a refused part is not counted.

        Args:
            visit: Of the request; made anew for each.
            items: More of them.
            nbytes: More of them.
            now_s: Monotonic time.
        """
        self._pass_time(now_s)
        for what, wanted, own, queued, limit in (
            ("items", items, visit.items, self.items, self._limits.items),
            ("bytes", nbytes, visit.nbytes, self.nbytes, self._limits.nbytes),
        ):
            if queued + wanted > limit:
                too_large = own + wanted > limit
                excess = (queued + wanted - limit) / queued if queued else 0.0
                return Refusal(
                    what=what,
                    wanted=own + wanted,
                    queued=queued - own,
                    limit=limit,
                    wait_s=None if too_large else self._wait_s(excess),
                )
        if visit == Visit() and (items or nbytes):
            self.requests += 1
        self.items += items
        self.nbytes += nbytes
        visit.items += items
        visit.nbytes += nbytes
        return None

    def leave(self, visit: Visit, *, now_s: float) -> None:
        """The request was answered, refused or given up: give back all that it occupies."""
        if visit == Visit():
            return
        self._pass_time(now_s)
        self._answered += 1
        self.requests -= 1
        self.items -= visit.items
        self.nbytes -= visit.nbytes
        visit.items = visit.nbytes = 0
        if self._busy_s > WINDOW_S:
            self._answered *= WINDOW_S / self._busy_s
            self._busy_s = WINDOW_S

    def _pass_time(self, now_s: float) -> None:
        # Idle time says nothing of how fast requests are answered.
        if self.requests:
            self._busy_s += now_s - self._seen_s
        self._seen_s = now_s

    def _wait_s(self, share: float) -> float:
        """Return how long that share of all requests takes to be answered, at the observed rate."""
        # The request under way counts as answered now: a stalled instance tells longer times.
        seconds_each = self._busy_s / (self._answered + 1)
        return min(max(share * self.requests * seconds_each, SHORTEST_WAIT_S), LONGEST_WAIT_S)
