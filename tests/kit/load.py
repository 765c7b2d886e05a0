"""Load that goes on while something else happens to a topology."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")
DEADLINE_S = 240.0
_POLL_S = 0.05


class Load(Generic[T]):
    """Clients that send one request after the other, until the end of a ``with`` block.

    Args:
        send: Sends the request with this number, and returns its result.
        clients: Requests at once.
        pause_s: Seconds between two requests of a client: without, they compute all the time.

    Attributes:
        seen: Results, in the order in which they came.
    """

    def __init__(self, send: Callable[[int], T], *, clients: int, pause_s: float = 0.2) -> None:
        self.seen: list[T] = []
        self._send = send
        self._pause_s = pause_s
        self._numbers = itertools.count()
        self._end = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._go_on) for _ in range(clients)]

    def _go_on(self) -> None:
        while not self._end.wait(self._pause_s):
            self.seen.append(self._send(next(self._numbers)))

    def wait_for(self, count: int) -> list[T]:
        """Wait for so many more results, and return them.

        Raises:
            AssertionError: They did not come in time.
        """
        begin, deadline_s = len(self.seen), time.monotonic() + DEADLINE_S
        while len(self.seen) < begin + count:
            assert time.monotonic() < deadline_s, f"not within {DEADLINE_S:g} s: {count} results"
            for each in self._clients:
                if each.done():
                    each.result()
            time.sleep(_POLL_S)
        return self.seen[begin:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let open requests end; raise the error of a client, unless the block has one."""
        self._end.set()
        self._pool.shutdown()
        for each in self._clients:
            if error is None:
                each.result()
