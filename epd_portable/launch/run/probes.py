"""Asks many processes how they are, at once: a silent one holds up nobody but its own thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_THREADS = 64
"""So many silent processes at a time; while more are, some are asked less often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed(Generic[T]):
    """How one probe ended.

    Attributes:
        what: What was asked.
        asked_at: Time at which it was.
        well: Its answer.
    """

    what: T
    asked_at: float
    well: bool


class Probes(Generic[T]):
    """Probes that are under way, one at a time for each of what is asked."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="epd-probe")
        self._under_way: dict[T, Future[Probed[T]]] = {}

    def ask(self, what: T, question: Callable[[T], bool]) -> None:
        """Ask in a thread, unless a probe of the same is under way."""
        if what not in self._under_way:
            self._under_way[what] = self._threads.submit(_probe, what, question)

    def answers(self) -> list[Probed[T]]:
        """Return the probes that have ended; each is returned once.

        Raises:
            Exception: What a question raised.
        """
        ended = [what for what, future in self._under_way.items() if future.done()]
        return [self._under_way.pop(what).result() for what in ended]

    def close(self) -> None:
        """Let go of what is under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _probe(what: T, question: Callable[[T], bool]) -> Probed[T]:
    asked_at = time.monotonic()
    return Probed(what=what, asked_at=asked_at, well=question(what))
