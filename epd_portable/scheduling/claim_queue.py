"""The order of claims that wait: whose place changes is found at its new one."""

from __future__ import annotations

import heapq
import itertools

from epd_portable.scheduling.items import Claim, Claimant

Order = tuple[tuple[bool, int], int]
"""A claim's place among all: its request's rank, and its own in the prompt."""


def order(claim: Claim) -> Order:
    """Return a claim's place among all: the smaller comes first."""
    return (claim.who.rank, claim.place)


class ClaimQueue:
    """Claims that wait, the first first.

    A claim is pushed whenever its place changes. Entries for former places, and of claims that wait
    no more, do not count and go in time.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Order, int, Claim]] = []
        self._numbers = itertools.count()
        self._bound = 64

    def push(self, claim: Claim) -> None:
        """Note the place of a claim, if it waits."""
        if not claim.waits:
            return
        if len(self._entries) > self._bound:
            self._entries = [each for each in self._entries if _counts(each)]
            heapq.heapify(self._entries)
            self._bound = 2 * len(self._entries) + 64
        heapq.heappush(self._entries, (order(claim), next(self._numbers), claim))

    @property
    def first(self) -> Claim | None:
        """The claim whose turn it is; ``None`` if none waits."""
        while self._entries and not _counts(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][-1] if self._entries else None

    @property
    def first_request(self) -> Claimant | None:
        """The request of that claim."""
        first = self.first
        return None if first is None else first.who


def _counts(entry: tuple[Order, int, Claim]) -> bool:
    """Tell whether the claim waits, and in this place."""
    return entry[-1].waits and entry[0] == order(entry[-1])
