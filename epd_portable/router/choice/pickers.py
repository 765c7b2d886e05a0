"""Built-in pickers: which one it is, of the candidates that were scored."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence

from epd_portable.router.choice.parameters import BuiltIn, Factory, Ignored, Parameters
from epd_portable.router.choice.selection_types import Candidate, Candidates, SelectionRequest


class _Picking(Parameters):
    """One is picked, and another one when it fails."""

    maxNumOfEndpoints: Ignored = 1


class MaxScorePicker(BuiltIn[_Picking]):
    """``max-score-picker``: the best one; of equals, any."""

    takes = _Picking

    def pick(
        self, request: SelectionRequest, candidates: Candidates, scores: Sequence[float]
    ) -> Candidate:
        """See `ScorePicker`."""
        best = max(scores)
        equal = [index for index, score in enumerate(scores) if score == best]
        return candidates[equal[int(request.chance() * len(equal))]]


class _WeightedRandom(BuiltIn[_Picking]):
    takes = _Picking

    def pick(
        self, request: SelectionRequest, candidates: Candidates, scores: Sequence[float]
    ) -> Candidate:
        if max(scores) <= 0:
            scores = [1.0] * len(scores)
        weights = [each.weight * score for each, score in zip(candidates, scores, strict=True)]
        return _any(request, candidates, weights)


class _Random(BuiltIn[_Picking]):
    takes = _Picking

    def pick(
        self, request: SelectionRequest, candidates: Candidates, scores: Sequence[float]
    ) -> Candidate:
        return _any(request, candidates, [each.weight for each in candidates])


def _any(request: SelectionRequest, candidates: Candidates, weights: Sequence[float]) -> Candidate:
    sums = list(itertools.accumulate(weights))
    index = bisect.bisect_right(sums, request.chance() * sums[-1])
    # Rounding may lead beyond the last one.
    return candidates[min(index, len(candidates) - 1)]


TYPES: Mapping[str, Factory] = {
    "max-score-picker": MaxScorePicker,
    "weighted-random-picker": _WeightedRandom,
    "random-picker": _Random,
}
