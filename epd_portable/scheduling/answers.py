"""Answers of an encode instance, until its device has computed what they are about."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Generic, TypeVar

AnswerT = TypeVar("AnswerT")


class WithheldAnswers(Generic[AnswerT]):
    """Keeps the answers of steps that were queued, in their order.

    Steps have numbers that grow, and are computed in their order.
    """

    def __init__(self) -> None:
        self._computed = 0
        self._held: deque[tuple[int, int, list[AnswerT]]] = deque()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._held)

    def computed(self, step: int) -> None:
        """A step and those before it have been computed."""
        self._computed = max(self._computed, step)

    def pass_on(self, step: int, answers: Mapping[int, list[AnswerT]]) -> dict[int, list[AnswerT]]:
        """Take the answers of a step in, and return those of steps that have been computed.

        Args:
            step: Its number; 0 for one in which nothing is computed.
            answers: By client, in their order.
        """
        self._held.extend((step, client, each) for client, each in answers.items() if each)
        ready: dict[int, list[AnswerT]] = defaultdict(list)
        while self._held and self._held[0][0] <= self._computed:
            _, client, some = self._held.popleft()
            ready[client] += some
        return dict(ready)
