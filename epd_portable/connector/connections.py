"""What a producer has opened to its consumers, no more than a process can have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_CONSUMERS = 64
"""To which ZMQ connections are kept; one more costs the one that was used least lately its own.

ZMQ tries for ever to reach who is gone, and does not tell. So instances that come and go would
otherwise add up until the process has no sockets left.
"""


class Connections(Generic[T]):
    """At most `MAX_CONSUMERS` of what is opened once for each address. Not for several threads.

    Args:
        open_: Opens it for an address.
        close: Closes what was used least lately.
    """

    def __init__(self, open_: Callable[[str], T], close: Callable[[T], None]) -> None:
        self._open = open_
        self._close = close
        self._by_address: dict[str, T] = {}
        """The one that was used least lately first."""

    def use(self, address: str) -> T:
        """Return what is open for an address, or open it."""
        found = self._by_address.pop(address, None)
        if found is None:
            while len(self._by_address) >= MAX_CONSUMERS:
                self._close(self._by_address.pop(next(iter(self._by_address))))
            found = self._open(address)
        self._by_address[address] = found
        return found

    def get(self, address: str) -> T | None:
        """Return what is open for an address, if anything is."""
        return self._by_address.get(address)

    def drop(self, address: str) -> T | None:
        """Forget what is open for an address and return it, for the caller to close."""
        return self._by_address.pop(address, None)

    def close_where(self, is_over: Callable[[T], bool]) -> None:
        """Close what this says is of no use any more."""
        for address, each in list(self._by_address.items()):
            if is_over(each):
                self._close(self._by_address.pop(address))

    def close(self) -> None:
        """Close everything."""
        for each in self._by_address.values():
            self._close(each)
        self._by_address.clear()
