"""How much an encode instance takes on at once, and when it has room again.

Requests are counted by their items and by the bytes of their bodies, from their arrival to the end
of their answers. Times are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST_WAIT_S = 0.05
LONGEST_WAIT_S = 30.0
WINDOW_S = 10.0
"""Busy time over which it is observed; what is older fades."""


class Pace:
    """Ends of work in busy time: idle time says nothing of how fast work is done."""

    def __init__(self) -> None:
        self._ended = 0.0
        self._busy_s = 0.0
        self._seen_s = 0.0

    @property
    def seconds_each(self) -> float:
        """Busy seconds for each end.

        What is under way counts as ended now: of work that has stalled longer times result.
        """
        return self._busy_s / (self._ended + 1)

    def see(self, now_s: float, *, busy: bool) -> None:
        """Let time pass; ``busy`` says whether there was work since the last call."""
        if busy:
            self._busy_s += now_s - self._seen_s
        self._seen_s = now_s

    def count_end(self) -> None:
        """Count one end, now."""
        self._ended += 1
        if self._busy_s > WINDOW_S:
            self._ended *= WINDOW_S / self._busy_s
            self._busy_s = WINDOW_S


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
    pixels: int = 0


class Admission:
    """Counts what is queued, and refuses what is beyond the limits.

    Attributes:
        pixels: Queued, as far as they are known.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self.items = 0
        self.nbytes = 0
        self.pixels = 0
        self.requests = 0
        self._pace = Pace()

    def add_part(
        self, visit: Visit, *, items: int = 0, nbytes: int = 0, now_s: float
    ) -> Refusal | None:
        """Count more items and bytes of a request; a refused part is not counted."""
        self._pace.see(now_s, busy=self.requests > 0)
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

    def found(self, visit: Visit, pixels: int) -> None:
        """Note how many pixels the items of a request have that was taken on."""
        self.pixels += pixels
        visit.pixels += pixels

    def leave(self, visit: Visit, *, now_s: float) -> None:
        """The request was answered, refused or given up: give back all that it occupies."""
        if visit == Visit():
            return
        self._pace.see(now_s, busy=self.requests > 0)
        self._pace.count_end()
        self.requests -= 1
        self.items -= visit.items
        self.nbytes -= visit.nbytes
        self.pixels -= visit.pixels
        visit.items = visit.nbytes = visit.pixels = 0

    def _wait_s(self, share: float) -> float:
        """Return how long that share of all requests takes to be answered, at the observed rate."""
        wait_s = share * self.requests * self._pace.seconds_each
        return min(max(wait_s, SHORTEST_WAIT_S), LONGEST_WAIT_S)
