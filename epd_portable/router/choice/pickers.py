"""Pickers: who it is, of those that were scored."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from epd_portable.router.choice.plugin import BuiltIn, Parameters, Vain
from epd_portable.router.choice.situation import Contender, Need


class Picking(Parameters):
    """Of every picker.

    Attributes:
        maxNumOfEndpoints: Taken, and without effect: one is picked, and another one when it fails.
    """

    maxNumOfEndpoints: Vain = 1


class _Picker(BuiltIn[Picking]):
    takes = Picking


class MaxScorePicker(_Picker):
    """``max-score-picker``: the best one; of equals, any."""

    def pick(
        self, need: Need, contenders: Sequence[Contender], scores: Sequence[float]
    ) -> Contender:
        """See `ScorePicker`."""
        best = max(scores)
        equal = [index for index, score in enumerate(scores) if score == best]
        return contenders[equal[int(need.chance() * len(equal))]]


class WeightedRandomPicker(_Picker):
    """``weighted-random-picker``: each as often as its score is high."""

    def pick(
        self, need: Need, contenders: Sequence[Contender], scores: Sequence[float]
    ) -> Contender:
        """See `ScorePicker`."""
        if max(scores) <= 0:
            scores = [1.0] * len(scores)
        pairs = zip(contenders, scores, strict=True)
        return _any(need, contenders, [each.weight * score for each, score in pairs])


class RandomPicker(_Picker):
    """``random-picker``: each as often as its weight says."""

    def pick(
        self, need: Need, contenders: Sequence[Contender], scores: Sequence[float]
    ) -> Contender:
        """See `ScorePicker`."""
        return _any(need, contenders, [each.weight for each in contenders])


def _any(need: Need, contenders: Sequence[Contender], weights: Sequence[float]) -> Contender:
    sums = list(itertools.accumulate(weights))
    index = bisect.bisect_right(sums, need.chance() * sums[-1])
    # Rounding may lead beyond the last one.
    return contenders[min(index, len(contenders) - 1)]
