"""A producer's connections to its consumers: least recently used ones are closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_CONSUMERS = 64
"""Consumers to which connections are kept: ZMQ reconnects for ever to those that have gone, so
without a limit a process would run out of sockets."""


class Connections(Generic[T]):
    """At most `MAX_CONSUMERS` connections by address; for one thread."""

    def __init__(self, open_: Callable[[str], T], close: Callable[[T], None]) -> None:
        self._open = open_
        self._close = close
        self._by_address: dict[str, T] = {}
        """Least recently used first."""

    def use(self, address: str) -> T:
        """Return the connection to an address; opens it if need be."""
        found = self._by_address.pop(address, None)
        if found is None:
            while len(self._by_address) >= MAX_CONSUMERS:
                self._close(self._by_address.pop(next(iter(self._by_address))))
            found = self._open(address)
        self._by_address[address] = found
        return found

    def get(self, address: str) -> T | None:
        """Return the connection to an address, if it is open."""
        return self._by_address.get(address)

    def drop(self, address: str) -> T | None:
        """Remove and return the connection to an address, for the caller to close."""
        return self._by_address.pop(address, None)

    def close(self) -> None:
        """Close everything."""
        for each in self._by_address.values():
            self._close(each)
        self._by_address.clear()
