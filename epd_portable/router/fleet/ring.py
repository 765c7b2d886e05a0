"""Which of the usable instances of a role gets what: by item on a ring of hashes, or by load."""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from epd_portable.router.fleet.tally import Tally

LOAD_BOUND = 1.25
"""No encoder takes more than this multiple of its share of the load."""
FEW = 16
"""Up to so many prefill+decode instances the loads of all are compared, else those of two."""
PLACES = 21
"""From so many places a key looks at the ring."""
_MASK = (1 << 64) - 1


class OnRing(Protocol):
    """What a ring asks of an instance.

    Attributes:
        point: Its place on the circle, see `hashes`.
        weight: How much it takes beside others.
        in_flight: What this process has it do.
    """

    point: int
    weight: float
    in_flight: int

    @property
    def load(self) -> int:
        """What all processes have it do."""
        ...


_T = TypeVar("_T", bound=OnRing)


class Ring(Generic[_T]):
    """Instances among which is chosen, ordered by their points on a circle of hashes.

    Each has one point. A key looks at the circle from several places, and prefers whoever is
    nearest after one of them: so the shares of few instances are even, and when one leaves only the
    keys that preferred it move. (Appleton and O'Reilly, Multi-probe consistent hashing, 2015.)

    Args:
        tally: Where is counted.
        row: Of the sum of what its instances have in flight.

    Attributes:
        instances: In the order of their points.
        row: See above.
        weight: Of all of them.
    """

    def __init__(self, tally: Tally, row: int) -> None:
        self.instances: list[_T] = []
        self.row = row
        self.weight = 0.0
        self._tally = tally
        self._points: list[int] = []

    def __len__(self) -> int:
        return len(self.instances)

    def add(self, instance: _T) -> None:
        """Let an instance be chosen."""
        index = bisect_left(self._points, instance.point)
        self._points.insert(index, instance.point)
        self.instances.insert(index, instance)
        self.weight += instance.weight
        self._tally.work(self.row, instance.in_flight)

    def remove(self, instance: _T) -> None:
        """Let an instance be chosen no more."""
        index = bisect_left(self._points, instance.point)
        while self.instances[index] is not instance:
            index += 1
        del self._points[index], self.instances[index]
        # A sum of what is left, as differences of floats would drift.
        self.weight = sum(each.weight for each in self.instances)
        self._tally.work(self.row, -instance.in_flight)

    def near(self, key: str, exclude: Sequence[_T]) -> _T | None:
        """Return the instance that a key prefers of those within the load bound."""
        count = len(self.instances) - len(exclude)
        if not count:
            return None
        total = self._tally.load(self.row) - sum(instance.load for instance in exclude)
        weight = self.weight - sum(instance.weight for instance in exclude)
        share = LOAD_BOUND * (total + 1) / weight
        nearest = sorted(self._seen_from(key))
        best = None
        for instance in self._in_order(nearest):
            if instance in exclude:
                continue
            if instance.load < share * instance.weight:
                return instance
            best = best or instance
        # Other processes count meanwhile, so that all may be above what was the limit.
        return best

    def lightest(self, chance: random.Random, exclude: Sequence[_T]) -> _T | None:
        """Return the instance with the least load for its weight; of many, the lighter of two."""
        count = len(self.instances)
        if count == len(exclude):
            return None
        if count > FEW:
            one = chance.randrange(count)
            other = (one + 1 + chance.randrange(count - 1)) % count
            pair = (self._at(one, exclude), self._at(other, exclude))
            return min(pair, key=lambda instance: instance.load / instance.weight)
        loads = [(i.load / i.weight, i) for i in self.instances if i not in exclude]
        least = min(load for load, _ in loads)
        return chance.choice([instance for load, instance in loads if load == least])

    def _at(self, index: int, exclude: Sequence[_T]) -> _T:
        while self.instances[index] in exclude:
            index = (index + 1) % len(self.instances)
        return self.instances[index]

    def _seen_from(self, key: str) -> Iterable[tuple[int, int]]:
        """Return distance and index of whoever is next after each place from which a key looks."""
        points, count = self._points, len(self._points)
        place, step = hashes(key)
        for _ in range(PLACES):
            index = bisect_left(points, place)
            if index == count:
                index = 0
            yield (points[index] - place) & _MASK, index
            place = (place + step) & _MASK

    def _in_order(self, nearest: Sequence[tuple[int, int]]) -> Iterable[_T]:
        """Return those seen first, the nearest first, and then everybody around the circle."""
        for _, index in nearest:
            yield self.instances[index]
        _, index = nearest[0]
        yield from self.instances[index:]
        yield from self.instances[:index]


def hashes(key: str) -> tuple[int, int]:
    """Return two places on the ring for a key."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
