"""Built-in pickers: which one it is, of the candidates that were scored."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence

from epd_portable.router.choice.parameters import Ignored, Parameters
from epd_portable.router.choice.selection_types import Candidate, Candidates, SelectionRequest


class _Picker(Parameters):
    maxNumOfEndpoints: Ignored = 1


class MaxScorePicker(_Picker):
    """The best one; of equals, any."""

    def pick(
        self, request: SelectionRequest, candidates: Candidates, scores: Sequence[float]
    ) -> Candidate:
        """See `ScorePicker`."""
        best = max(scores)
        equal = [each for each, score in zip(candidates, scores, strict=True) if score == best]
        return equal[int(request.chance() * len(equal))]


class _WeightedRandomPicker(_Picker):
    def pick(
        self, request: SelectionRequest, candidates: Candidates, scores: Sequence[float]
    ) -> Candidate:
        if max(scores) <= 0:
            scores = [1.0] * len(scores)
        pairs = zip(candidates, scores, strict=True)
        sums = [*itertools.accumulate(each.weight * score for each, score in pairs)]
        index = bisect.bisect_right(sums, request.chance() * sums[-1])
        # Rounding may lead beyond the last one.
        return candidates[min(index, len(candidates) - 1)]


class _RandomPicker(_WeightedRandomPicker):
    def pick(
        self, request: SelectionRequest, candidates: Candidates, scores: Sequence[float]
    ) -> Candidate:
        return super().pick(request, candidates, [1.0] * len(scores))


TYPES: Mapping[str, type[Parameters]] = {
    "max-score-picker": MaxScorePicker,
    "weighted-random-picker": _WeightedRandomPicker,
    "random-picker": _RandomPicker,
}
