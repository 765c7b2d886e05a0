"""What an instance most likely has in its caches, by what it was given. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


class Recent(dict[K, None]):
    """The latest of what was used, at most so many; the one unused for longest goes first.

    Args:
        most: How many.
    """

    __slots__ = ("_most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def use(self, keys: Iterable[K]) -> list[K]:
        """Take keys as used, the last one last; return those that are gone for them."""
        for key in keys:
            self.pop(key, None)
            self[key] = None
        # In one go: each look for the first one passes the places of those that are gone.
        gone = [*itertools.islice(self, max(0, len(self) - self._most))]
        for key in gone:
            del self[key]
        return gone

    def forget(self, key: K) -> None:
        """Take a key as gone, if it is there."""
        self.pop(key, None)


class Holdings:
    """What one instance was given and most likely still has.

    Nobody tells what an engine has evicted, so this is a guess with a bound.

    Args:
        items: How many encoder outputs it keeps at most.
        blocks: How many blocks of prompts.
        beginnings: Where to note who has the first block of a prompt, by the block.

    Attributes:
        items: By name.
        blocks: See `Need.blocks`.
    """

    __slots__ = ("_beginnings", "blocks", "items")

    def __init__(
        self, *, items: int = 2048, blocks: int = 31_250, beginnings: Beginnings | None = None
    ) -> None:
        self._beginnings: Beginnings = {} if beginnings is None else beginnings
        self.items: Recent[str] = Recent(items)
        self.blocks: Recent[int] = Recent(blocks)

    def prefix(self, blocks: Sequence[int], guess: int = 0) -> int:
        """Return how many of a request's first blocks are here.

        Who has a block has those before it, too: they are named and kept together.

        Args:
            blocks: Of the request.
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
        self._begins_no_more(self.blocks.use(reversed(blocks)))
        if blocks and blocks[0] in self.blocks:
            self._beginnings.setdefault(blocks[0], set()).add(self)

    def clear(self) -> None:
        """The instance has been started again or has left, and has nothing."""
        self.items.clear()
        self._begins_no_more(self.blocks)
        self.blocks.clear()

    def _begins_no_more(self, blocks: Iterable[int]) -> None:
        beginnings = self._beginnings
        for block in blocks:
            if block in beginnings:
                beginnings[block].discard(self)
                if not beginnings[block]:
                    del beginnings[block]


Beginnings = dict[int, set[Holdings]]
