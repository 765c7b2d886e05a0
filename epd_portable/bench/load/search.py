"""Looks for the highest rate at which answers are in time, for all sides at once. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from epd_portable.bench.load.plan import SearchRange

TIMES = 2
"""So often a rate is asked whose result contradicts another's."""


@dataclass(kw_only=True, slots=True)
class Findings:
    """What is known of one side.

    Attributes:
        rates: Whether the limits were met, by rate.
    """

    rates: dict[float, bool] = field(default_factory=dict)

    @property
    def missed(self) -> float:
        """Lowest rate that did not meet the limits; infinite for none."""
        return min((rate for rate, met in self.rates.items() if not met), default=math.inf)

    @property
    def met(self) -> float:
        """Highest rate that met them, as did all below it; 0 for none."""
        return max(
            (rate for rate, met in self.rates.items() if met and rate < self.missed), default=0
        )

    @property
    def above(self) -> list[float]:
        """Rates that met them although a lower one did not, rising."""
        return sorted(rate for rate, met in self.rates.items() if met and rate > self.missed)


@dataclass(kw_only=True, slots=True)
class GoodputSearch:
    """A bisection for each side, whose rates are measured on all sides.

    A rate that was met above one that was not is a contradiction, on whatever side: the highest of
    those missed and the lowest of those met above it are asked again. What is still contradictory
    then is read strictly: the highest rate is below the lowest that was missed.

    Attributes:
        range: Where to look.
        sides: What is known, by side.
        asked: How often each rate was.
    """

    range: SearchRange
    sides: dict[str, Findings] = field(default_factory=dict)
    asked: Counter[float] = field(default_factory=Counter)

    @classmethod
    def among(cls, range: SearchRange, sides: Iterable[str]) -> GoodputSearch:
        """Begin a search for these sides."""
        return cls(range=range, sides={side: Findings() for side in sides})

    def next_rate(self) -> float | None:
        """Return a rate to measure, or ``None`` when every side is known closely enough."""
        for findings in self.sides.values():
            for rate in (*self._doubtful(findings), self._next_of(findings)):
                if rate is not None:
                    return rate
        return None

    def learn(self, rate: float, met: Mapping[str, bool]) -> None:
        """Take in what every side did at a rate, in all rounds so far."""
        self.asked[rate] += 1
        for side, did in met.items():
            self.sides[side].rates[rate] = did

    def _doubtful(self, findings: Findings) -> list[float]:
        """Return the neighbours that contradict each other and were not asked again yet."""
        if not findings.above:
            return []
        above = findings.above[0]
        below = max(rate for rate, met in findings.rates.items() if not met and rate < above)
        return [rate for rate in (below, above) if self.asked[rate] < TIMES]

    def _next_of(self, findings: Findings) -> float | None:
        missed, met = findings.missed, findings.met
        low, high = met or self.range.low, min(missed, self.range.high)
        if missed <= self.range.low or met >= self.range.high:
            return None
        if high / low <= 1 + self.range.precision:
            # The ends of the range are measured only when the search has come to them.
            if not met:
                return self.range.low
            if math.isinf(missed):
                return self.range.high
            return None
        return _short(math.sqrt(low * high))


def _short(rate: float) -> float:
    """Return a rate with three digits: what is measured is what is shown."""
    return float(f"{rate:.3g}")
