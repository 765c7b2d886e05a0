"""What instances most likely have in their caches, by what they were given. Pure.

Engines do not report what they evict, so this is an estimate with a bound.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


class Recent(dict[K, None]):
    """The keys that were used last, at most so many."""

    __slots__ = ("_most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def use(self, keys: Iterable[K]) -> list[K]:
        """Take keys as used, the last one last; return those that drop out."""
        for key in keys:
            self.pop(key, None)
            self[key] = None
        # In one go: each look for the first one passes the places of those that are gone.
        gone = [*itertools.islice(self, max(0, len(self) - self._most))]
        for key in gone:
            del self[key]
        return gone


class CacheSizes:
    """How much each instance keeps, and which of them have the beginning of a prompt."""

    def __init__(self, *, items: int = 2048, blocks: int = 31_250) -> None:
        self.items = items
        self.blocks = blocks
        self._with_first: dict[int, set[CacheEstimate]] = {}

    def new_estimate(self) -> CacheEstimate:
        """Return the estimate of an instance that has nothing yet."""
        return CacheEstimate(self.items, self.blocks, self._with_first)

    def with_prefix(self, blocks: Sequence[int]) -> Collection[CacheEstimate]:
        """Return the estimates of those that have the first of some blocks."""
        return self._with_first.get(blocks[0], ()) if blocks else ()


class CacheEstimate:
    """What one instance was given and most likely still has.

    Attributes:
        items: Encoder outputs, by name.
        blocks: Of prompts, each as a hash of it and of all before it.
    """

    __slots__ = ("_with_first", "blocks", "items")

    def __init__(self, items: int, blocks: int, with_first: dict[int, set[CacheEstimate]]) -> None:
        self.items: Recent[str] = Recent(items)
        self.blocks: Recent[int] = Recent(blocks)
        self._with_first = with_first

    def prefix(self, blocks: Sequence[int], guess: int = 0) -> int:
        """Return how many of a request's first blocks are here.

        Whoever has a block has those before it, too: they are named and kept together.

        Args:
            guess: How many that may be; a right one takes two looks.
        """
        known, count = self.blocks, len(blocks)
        if guess and blocks[guess - 1] not in known:
            low, high = 0, guess - 1
        elif guess < count and blocks[guess] in known:
            low, high = guess + 1, count
        else:
            return guess
        return bisect.bisect_left(blocks, True, low, high, key=lambda block: block not in known)

    def use_prefix(self, blocks: Sequence[int]) -> None:
        """Take a request's blocks as computed here; the first of them stays longest."""
        self._drop_first(self.blocks.use(reversed(blocks)))
        if blocks and blocks[0] in self.blocks:
            self._with_first.setdefault(blocks[0], set()).add(self)

    def clear(self) -> None:
        """Take everything as gone: the instance was restarted, or has left."""
        self.items.clear()
        self._drop_first(self.blocks)
        self.blocks.clear()

    def _drop_first(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if holders := self._with_first.get(block):
                holders.discard(self)
                if not holders:
                    del self._with_first[block]
