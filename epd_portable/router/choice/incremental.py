"""Scores that are kept until an instance changes: not computed anew for every request. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import compress
from operator import add, ne
from typing import Any

from epd_portable.router.choice.selection_types import (
    Candidate,
    Candidates,
    SelectionRequest,
    Stage,
)

_UNKNOWN = object()


class IncrementalScorer(ABC):
    """A scorer that uses nothing of a request but its stage.

    Each candidate has a measure, and a scale follows from the measures of all; a score is where a
    measure lies on the scale. So a candidate that changes has another score, and the others keep
    theirs, as long as the scale stays the same.
    """

    @abstractmethod
    def measure(self, stage: Stage, candidate: Candidate) -> Any:
        """Return what of a candidate is compared; only what `Candidate.version` counts."""

    @abstractmethod
    def scale(self, measures: Sequence[Any]) -> Any:
        """Return what else scores depend on; scales with which they are the same are equal."""

    @abstractmethod
    def rate(self, measures: Sequence[Any], scale: Any) -> list[float]:
        """Return the scores of some candidates, 0 to 1."""

    def score(self, request: SelectionRequest, candidates: Candidates) -> Sequence[float]:
        """See `Scorer`."""
        measures = [self.measure(request.stage, each) for each in candidates]
        return self.rate(measures, self.scale(measures))


class _Column:
    """What one scorer gives to each candidate, times its weight."""

    def __init__(self, scorer: IncrementalScorer, weight: float, count: int) -> None:
        self.parts: list[float] = [0.0] * count
        self._scorer = scorer
        self._weight = weight
        self._measures: list[Any] = [_UNKNOWN] * count
        self._scale: Any = _UNKNOWN

    def update(self, stage: Stage, candidates: Candidates, changed: list[int]) -> bool:
        """Measure candidates that have changed; return whether others have another score, too."""
        scorer, measures, moved = self._scorer, self._measures, []
        for index in changed:
            measure = scorer.measure(stage, candidates[index])
            if measure != measures[index]:
                measures[index] = measure
                moved.append(index)
        if not moved:
            return False
        scale = scorer.scale(measures)
        if scale != self._scale:
            self._scale = scale
            self.parts = [self._weight * score for score in scorer.rate(measures, scale)]
            return True
        scores = scorer.rate([measures[index] for index in moved], scale)
        for index, score in zip(moved, scores, strict=True):
            self.parts[index] = self._weight * score
        return False


class ScoreTable:
    """The scores of some candidates by some scorers, as `Candidate.version` was at the last look.

    Args:
        stage: That candidates are scored for.
        candidates: Rows.
        scorers: Columns, by name, with their weights.
    """

    def __init__(
        self,
        stage: Stage,
        candidates: Candidates,
        scorers: Mapping[str, tuple[IncrementalScorer, float]],
    ) -> None:
        count = len(candidates)
        self.stage = stage
        self.candidates = candidates[:]
        self._columns = {
            name: _Column(scorer, weight, count) for name, (scorer, weight) in scorers.items()
        }
        self._versions = [-1] * count
        self._totals = [0.0] * count

    def totals(self) -> list[float]:
        """Return the sum of each candidate's scores."""
        versions = [each.version for each in self.candidates]
        changed = [*compress(range(len(versions)), map(ne, versions, self._versions))]
        if changed:
            self._versions = versions
            columns = self._columns.values()
            # All of them are brought up to date.
            if any([each.update(self.stage, self.candidates, changed) for each in columns]):
                self._totals = [0.0] * len(versions)
                for each in columns:
                    self._totals = [*map(add, self._totals, each.parts)]
            else:
                for index in changed:
                    total = 0.0
                    for each in columns:
                        total += each.parts[index]
                    self._totals[index] = total
        return self._totals.copy()

    def parts(self) -> dict[str, list[float]]:
        """Return what each scorer has given at the last look, times its weight."""
        return {name: column.parts for name, column in self._columns.items()}
