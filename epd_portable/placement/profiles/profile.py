"""One stage's choice: filters, then scorers, then a picker."""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import TypeVar, cast

from epd_portable.placement.profiles.parameters import Parameters
from epd_portable.placement.profiles.scorers import NoHitLruScorer
from epd_portable.placement.profiles.selection_types import (
    Candidate,
    Candidates,
    Decision,
    Filter,
    ScorePicker,
    Scorer,
    SelectionRequest,
)

logger = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
"""A plug-in that fails is logged no more often than this."""
C = TypeVar("C", bound=Candidate)


class MaxScorePicker(Parameters):
    """The best one; of equals, any."""

    def pick(
        self, request: SelectionRequest, candidates: Candidates, scores: Sequence[float]
    ) -> Candidate:
        """See `ScorePicker`."""
        best = max(scores)
        equal = [each for each, score in zip(candidates, scores, strict=True) if score == best]
        return equal[int(request.chance() * len(equal))]


class _WeightedRandomPicker(Parameters):
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


PICKERS: Mapping[str, type[Parameters]] = {
    "max-score-picker": MaxScorePicker,
    "weighted-random-picker": _WeightedRandomPicker,
    "random-picker": _RandomPicker,
}


class PluginFailures(dict[str, float]):
    """When each plug-in of one place may be logged again that has failed there."""

    def log(self, where: str, name: str, error: Exception) -> None:
        """Log that a plug-in has failed, unless that was logged within `LOG_EVERY_S`."""
        now = time.monotonic()
        if now >= self.get(name, -math.inf):
            self[name] = now + LOG_EVERY_S
            message = "%s: plug-in %s has failed and is left out of a choice: %r"
            logger.error(message, where, name, error)


@dataclass(slots=True)
class Profile:
    """Chooses for one stage.

    A plug-in that raises, or answers what it should not, is left out of that choice, and the log
    says so: one wrong line in a plug-in stops no request. What built-in ones answer is not checked.

    Attributes:
        filters: By name, in their order.
        scorers: By name, with their weights.
        picker: Its name and itself; by default the best one is picked.
    """

    name: str
    filters: Mapping[str, Filter]
    scorers: Mapping[str, tuple[Scorer, float]]
    picker: tuple[str, ScorePicker] = ("max-score-picker", MaxScorePicker())
    _failures: PluginFailures = field(default_factory=PluginFailures, init=False)

    def choose(
        self, request: SelectionRequest, candidates: Sequence[C], decision: Decision | None = None
    ) -> C | None:
        """Return the candidate that should have it.

        Args:
            decision: Gets the reasons, if given.

        Returns:
            One of the candidates; ``None`` if there is none, or filters leave none.
        """
        is_explained = decision is not None
        decision = decision or Decision(stage=request.stage)
        decision.profile = self.name
        decision.filters["there"] = len(candidates)
        left = candidates
        for name, one in self.filters.items():
            if left:
                left = self._filtered(name, one, request, left)
                decision.filters[name] = len(left)
        if not left:
            decision.reason = "no instance is left" if candidates else "there is no instance"
            return None
        totals = self._scored(request, left, decision)
        chosen = self._picked(request, left, totals)
        for scorer, _ in self.scorers.values():
            if isinstance(scorer, NoHitLruScorer):
                scorer.note_picked(chosen)
        if is_explained:
            decision.totals = {each.name: one for each, one in zip(left, totals, strict=True)}
            decision.winner = chosen.name
        return chosen

    def _filtered(
        self, name: str, one: Filter, request: SelectionRequest, candidates: Sequence[C]
    ) -> Sequence[C]:
        try:
            kept = one.keep(request, candidates)
            if isinstance(one, Parameters):
                return cast("Sequence[C]", kept)
            names = {each.name for each in kept}
        except Exception as error:
            self._failures.log(f"profile {self.name}", name, error)
            return candidates
        return [each for each in candidates if each.name in names]

    def _scored(
        self, request: SelectionRequest, candidates: Sequence[C], decision: Decision
    ) -> list[float]:
        totals = [0.0] * len(candidates)
        for name, (one, weight) in self.scorers.items():
            try:
                scores = one.score(request, candidates)
                if not isinstance(one, Parameters):
                    scores = _checked(scores, len(candidates))
            except Exception as error:
                self._failures.log(f"profile {self.name}", name, error)
                continue
            weighted = [*scores] if weight == 1 else [weight * score for score in scores]
            decision.scores[name] = weighted
            totals = [*map(add, totals, weighted)]
        return totals

    def _picked(self, request: SelectionRequest, candidates: Sequence[C], totals: list[float]) -> C:
        name, picker = self.picker
        try:
            chosen = picker.pick(request, candidates, totals)
            return next(each for each in candidates if each is chosen)
        except Exception as error:
            self._failures.log(f"profile {self.name}", name, error)
            return candidates[max(range(len(totals)), key=totals.__getitem__)]


def _checked(scores: Sequence[float], count: int) -> list[float]:
    """Return scores between 0 and 1.

    Raises:
        ValueError: They are no numbers, or not so many.
    """
    found = [float(score) for score in scores]
    if len(found) != count or not all(map(math.isfinite, found)):
        raise ValueError(f"answered {found[:8]!r} for {count} candidates")
    return [min(max(score, 0.0), 1.0) for score in found]
