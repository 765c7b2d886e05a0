"""Consistent hashing with bounded loads: which instance a key prefers, while it has space. Pure.

One function decides it for everything that leads an image, or a conversation, to the instance that
had it before: the default rules, `front.choice` and the headers of hops.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

LOAD_BOUND = 1.25
"""Largest multiple of its share of the load that an instance takes."""
PROBES = 21
"""Places on the circle from which a key looks for an instance."""
_MASK = (1 << 64) - 1


class Member(Protocol):
    """Candidate of a choice."""

    @property
    def name(self) -> str:
        """Unique."""

    @property
    def weight(self) -> float:
        """Share of the load relative to other candidates; positive."""

    @property
    def load(self) -> int:
        """Requests or jobs that it was given and that have not ended."""


T = TypeVar("T", bound=Member)


class HashRing(Generic[T]):
    """Instances on a circle of hashes, with one point each.

    A key probes the circle at several places and prefers the instance whose point comes soonest
    after one of them, distances divided by weights: so shares are even among few instances, and
    when one leaves only the keys that preferred it move. (Appleton and O'Reilly, Multi-probe
    consistent hashing, 2015.)

    Attributes:
        members: In the order of their points.
    """

    def __init__(self, members: Iterable[T] = ()) -> None:
        self.members: list[T] = []
        self._points: list[int] = []
        for member in members:
            self.add(member)

    def add(self, member: T) -> None:
        """Let an instance be chosen."""
        point, _ = _hashes(member.name)
        index = bisect_left(self._points, point)
        self._points.insert(index, point)
        self.members.insert(index, member)

    def remove(self, member: T) -> None:
        """Let an instance be chosen no more."""
        index = self.members.index(member)
        del self._points[index], self.members[index]

    def in_order(self, key: str) -> Iterator[T]:
        """Yield every instance, some of them several times, the one that a key prefers first."""
        points, members, count = self._points, self.members, len(self._points)
        place, step = _hashes(key)
        found: list[tuple[float, int]] = []
        for _ in range(PROBES if count else 0):
            index = bisect_left(points, place)
            if index == count:
                index = 0
            found.append((((points[index] - place) & _MASK) / members[index].weight, index))
            place = (place + step) & _MASK
        found.sort()
        for _, index in found:
            yield members[index]
        if found:
            first = found[0][1]
            yield from members[first:]
            yield from members[:first]

    def choose(
        self, key: str, among: Collection[T] | None = None, bound: float = LOAD_BOUND
    ) -> T | None:
        """Return the member that a key prefers of some with capacity; ``None`` for none.

        Args:
            key: Such as an item's hash.
            among: Members that may be chosen; all by default.
            bound: Multiple of its share up to which a member has capacity; 1 for even shares.
        """
        among = self.members if among is None else among
        if not among:
            return None
        load, weight = sum(each.load for each in among), sum(each.weight for each in among)
        most = bounded_load(load, weight, bound)
        left = (each for each in self.in_order(key) if each in among)
        return next((each for each in left if each.load < most * each.weight), None)


def bounded_load(load: float, weight: float, bound: float = LOAD_BOUND) -> float:
    """Return the load, for each unit of its weight, below which an instance has space.

    Args:
        load: Sum of the loads of all instances.
        bound: See `HashRing.choose`.
    """
    return bound * (load + 1) / weight


def _hashes(key: str) -> tuple[int, int]:
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
