"""How much work there is for instances of each role, in seconds of one of them.

What an item takes is known from encoders (`epd_portable.placement.assignment.EncodeTimes`). What an
answer takes is less clear: an instance computes for several requests in the same step, so each is
charged an equal part of the time that it shares with the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TypeVar

from epd_portable.config.roles import Role
from epd_portable.media.limits import RequestItem

_NEW = 0.05
"""Weight of the latest answer in the average."""
_FORGET = 1.001
"""So many times longer do answers take by the least average, with each that has ended since."""

_Found = TypeVar("_Found")


def nearest_size(found: Mapping[tuple[str, int], _Found], name: str, size: int) -> _Found | None:
    """Return what is known of a size, or of the next smaller or larger one."""
    for near in (size, size - 1, size + 1):
        if (known := found.get((name, near))) is not None:
            return known
    return None


class Work:
    """What came, and what answers take, by role and size of the prompt.

    Sizes are powers of two of the tokens that were to be computed. With few requests at a time each
    has a large part of an instance, which could do more in the same time: answers are taken for the
    least that they took on average, which is forgotten slowly.

    Attributes:
        came_s: Seconds of work that came, by role, modality and size; a prompt's is ``text``, and
            an item's belongs to ``encode``, wherever it is encoded. What was not known then is 0.
    """

    def __init__(self) -> None:
        self.came_s: defaultdict[tuple[Role, str, int], float] = defaultdict(float)
        self._answers_s: dict[tuple[str, int], tuple[float, float]] = {}

    def item_came(self, item: RequestItem, seconds: float) -> None:
        """Count an item that has to be encoded."""
        self.came_s["encode", item.modality, item.pixels.bit_length()] += seconds

    def prompt_came(self, role: Role, tokens: int) -> None:
        """Count a prompt, of which so many tokens are to be computed."""
        self.came_s[role, "text", tokens.bit_length()] += self.answer_s(role, tokens)

    def answer_s(self, role: Role, tokens: int) -> float:
        """Return the seconds for an answer; 0 where none to about such a prompt has ended."""
        return (nearest_size(self._answers_s, role, tokens.bit_length()) or (0.0, 0.0))[1]

    def observe_answer(self, role: Role, tokens: int, seconds: float) -> None:
        """Take in what an answer took of its instance."""
        kind = role, tokens.bit_length()
        average, least = self._answers_s.get(kind, (seconds, seconds))
        average += _NEW * (seconds - average)
        self._answers_s[kind] = average, min(average, _FORGET * least)


class AnswerLoad:
    """Answers that one instance owes, and its time, of which all that it computes for have a part.

    Attributes:
        owed_ms: What they will take, in whole milliseconds: sums of floats would drift.
    """

    def __init__(self, work: Work, role: Role, clock: Callable[[], float]) -> None:
        self.owed_ms = 0
        self._work = work
        self._role: Role = role
        self._clock = clock
        self._each_s = self._until = 0.0

    def each_s(self, computes_for: int) -> float:
        """Return the seconds that a request has had, if it was there from the beginning.

        Args:
            computes_for: Requests that had their part since the call before: call it whenever this
                changes.
        """
        now = self._clock()
        if computes_for:
            self._each_s += (now - self._until) / computes_for
        self._until = now
        return self._each_s

    def expected_ms(self, tokens: int) -> int:
        """Return what an answer to a prompt will take, of which so many tokens are to compute."""
        return round(1000 * self._work.answer_s(self._role, tokens))

    def observe(self, tokens: int, computes_for: int, began_s: float) -> None:
        """Learn what an answer took; ``began_s`` is what `each_s` was when it began."""
        self._work.observe_answer(self._role, tokens, self.each_s(computes_for) - began_s)
