"""Quantiles and paired ratios of small samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Median of the ratios of pairs, with their quartiles, or the lowest and the highest of few."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return it as tables show it, for example ``1.21 (1.10–1.43)``."""
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values, at least one, lie, interpolated."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def paired_ratio(values: Sequence[float], peers: Sequence[float]) -> Ratio:
    """Compare two series of one length pair by pair: disturbances of both at once cancel out."""
    ratios = [value / peer for value, peer in zip(values, peers, strict=True)]
    return Ratio(
        median=quantile(ratios, 0.5), low=quantile(ratios, 0.25), high=quantile(ratios, 0.75)
    )
