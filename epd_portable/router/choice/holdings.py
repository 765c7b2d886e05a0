"""What an instance most likely has in its caches, by what it was given. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Recent(Generic[K]):
    """The latest of what was used, at most so many; the one unused for longest goes first.

    Args:
        most: How many.
    """

    __slots__ = ("_keys", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[K, None] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def use(self, keys: Iterable[K]) -> None:
        """Take keys as used, the last one last."""
        known = self._keys
        for key in keys:
            known.pop(key, None)
            known[key] = None
        while len(known) > self._most:
            del known[next(iter(known))]

    def forget(self, key: K) -> None:
        """Take a key as gone, if it is there."""
        self._keys.pop(key, None)

    def clear(self) -> None:
        """Take all as gone."""
        self._keys.clear()


class Holdings:
    """What one instance was given and most likely still has.

    Nobody tells what an engine has evicted, so this is a guess with a bound.

    Args:
        items: How many encoder outputs it keeps at most.
        blocks: How many blocks of prompts.

    Attributes:
        items: By name.
        blocks: See `Need.blocks`.
    """

    __slots__ = ("blocks", "items")

    def __init__(self, *, items: int = 2048, blocks: int = 31_250) -> None:
        self.items: Recent[str] = Recent(items)
        self.blocks: Recent[int] = Recent(blocks)

    def prefix(self, blocks: Sequence[int]) -> int:
        """Return how many of a request's first blocks are here."""
        known = self.blocks
        for count, block in enumerate(blocks):
            if block not in known:
                return count
        return len(blocks)

    def use_prefix(self, blocks: Sequence[int]) -> None:
        """Take a request's blocks as computed here; the first of them stays longest."""
        self.blocks.use(reversed(blocks))

    def clear(self) -> None:
        """The instance has been started again, and has nothing."""
        self.items.clear()
        self.blocks.clear()
