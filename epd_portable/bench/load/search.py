"""Looks for the highest rate at which answers are in time, for all sides at once. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from epd_portable.bench.load.plan import SearchRange


@dataclass(kw_only=True, slots=True)
class Bracket:
    """What is known of one side.

    Attributes:
        met: Highest rate that met the limits; 0 for none.
        missed: Lowest rate above it that did not; infinite for none.
    """

    met: float = 0.0
    missed: float = math.inf

    def learn(self, rate: float, *, met: bool) -> None:
        """Take in a measured rate; what lies outside what is known already is noise."""
        if met and self.met < rate < self.missed:
            self.met = rate
        elif not met and self.met < rate < self.missed:
            self.missed = rate


@dataclass(kw_only=True, slots=True)
class GoodputSearch:
    """A bisection for each side, whose rates are measured on all sides.

    Attributes:
        range: Where to look.
        brackets: What is known, by side.
    """

    range: SearchRange
    brackets: dict[str, Bracket] = field(default_factory=dict)

    @classmethod
    def among(cls, range: SearchRange, sides: Iterable[str]) -> GoodputSearch:
        """Begin a search for these sides."""
        return cls(range=range, brackets={side: Bracket() for side in sides})

    def next_rate(self) -> float | None:
        """Return a rate to measure, or ``None`` when every side is known closely enough."""
        for bracket in self.brackets.values():
            rate = self._next_of(bracket)
            if rate is not None:
                return rate
        return None

    def learn(self, rate: float, met: Mapping[str, bool]) -> None:
        """Take in what every side did at a rate."""
        for side, did in met.items():
            self.brackets[side].learn(rate, met=did)

    def _next_of(self, bracket: Bracket) -> float | None:
        low, high = bracket.met or self.range.low, min(bracket.missed, self.range.high)
        if bracket.missed <= self.range.low or bracket.met >= self.range.high:
            return None
        if high / low <= 1 + self.range.precision:
            # The ends of the range are measured only when the search has come to them.
            if not bracket.met:
                return self.range.low
            if math.isinf(bracket.missed):
                return self.range.high
            return None
        return _short(math.sqrt(low * high))


def _short(rate: float) -> float:
    """Return a rate with three digits: what is measured is what is shown."""
    return float(f"{rate:.3g}")
