"""One stage's choice: filters, then scorers, then a picker."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar, cast

from epd_portable.router.choice.incremental import IncrementalScorer, ScoreTable
from epd_portable.router.choice.pickers import MaxScorePicker
from epd_portable.router.choice.scorers import NoHitLruScorer
from epd_portable.router.choice.selection_types import (
    Candidate,
    Decision,
    Filter,
    ScorePicker,
    Scorer,
    SelectionRequest,
    Stage,
)

logger = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
"""A plug-in that fails is logged no more often than this."""
MOST_TABLES = 4
"""Groups of candidates whose scores are kept: filters may leave others for the next request."""
C = TypeVar("C", bound=Candidate)


class PluginFailures:
    """Logs which plug-ins have failed, each at most every `LOG_EVERY_S`."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._until: dict[str, float] = {}

    def log(self, name: str, problem: str) -> None:
        """Log that a plug-in has failed, unless that was logged lately."""
        now = time.monotonic()
        if now >= self._until.get(name, -math.inf):
            self._until[name] = now + LOG_EVERY_S
            logger.error(
                "%s: plug-in %s has failed and is left out of a choice: %s",
                self._where,
                name,
                problem,
            )


class Profile:
    """Chooses for one stage.

    A plug-in that raises, or answers what it should not, is left out of that choice, and the log
    says so: one wrong line in a plug-in stops no request.

    Args:
        name: Of the profile.
        filters: By name, in their order.
        scorers: By name, with their weights.
        picker: Its name and itself.
        trusted: Names of those whose answers are not checked: the built-in ones.
    """

    def __init__(
        self,
        name: str,
        filters: Mapping[str, Filter],
        scorers: Mapping[str, tuple[Scorer, float]],
        picker: tuple[str, ScorePicker] | None = None,
        *,
        trusted: Collection[str] = (),
    ) -> None:
        self.name = name
        self._filters = dict(filters)
        self._incremental = {
            key: (scorer, weight)
            for key, (scorer, weight) in scorers.items()
            if isinstance(scorer, IncrementalScorer) and key in trusted
        }
        self._scorers = {k: each for k, each in scorers.items() if k not in self._incremental}
        self._tables: deque[ScoreTable] = deque(maxlen=MOST_TABLES)
        self._picker_name, self._picker = picker or ("max-score-picker", MaxScorePicker("", {}))
        self._trusted = trusted
        self._lru = [one for one, _ in scorers.values() if isinstance(one, NoHitLruScorer)]
        self._failures = PluginFailures(f"profile {name}")

    def choose(
        self, request: SelectionRequest, candidates: Sequence[C], decision: Decision | None = None
    ) -> C | None:
        """Return the candidate that should have it.

        Args:
            request: What is asked.
            candidates: From the preferred tier.
            decision: Gets the reasons, if given.

        Returns:
            One of the candidates; ``None`` if there is none, or filters leave none.
        """
        if decision is not None:
            decision.profile = self.name
            decision.filters["there"] = len(candidates)
        left = candidates
        for name, one in self._filters.items():
            if not left:
                break
            left = self._kept(name, one, request, left)
            if decision is not None:
                decision.filters[name] = len(left)
        if not left:
            if decision is not None:
                decision.reason = "no instance is left" if candidates else "there is no instance"
            return None
        totals = self._scored(request, left, decision)
        chosen = self._picked(request, left, totals)
        for each in self._lru:
            each.note_picked(chosen)
        if decision is not None:
            decision.totals = {each.name: total for each, total in zip(left, totals, strict=True)}
            decision.winner = chosen.name
        return chosen

    def _kept(
        self, name: str, one: Filter, request: SelectionRequest, candidates: Sequence[C]
    ) -> Sequence[C]:
        try:
            kept = one.keep(request, candidates)
            if name in self._trusted:
                return cast("Sequence[C]", kept)
            names = {each.name for each in kept}
        except Exception as error:
            self._failures.log(name, repr(error))
            return candidates
        return [each for each in candidates if each.name in names]

    def _scored(
        self, request: SelectionRequest, candidates: Sequence[C], decision: Decision | None
    ) -> list[float]:
        table = self._table_of(request.stage, candidates)
        totals = table.totals()
        if decision is not None:
            for name, parts in table.parts().items():
                for each, part in zip(candidates, parts, strict=True):
                    decision.scores.setdefault(each.name, {})[name] = part
        for name, (one, weight) in self._scorers.items():
            try:
                scores = one.score(request, candidates)
                if name not in self._trusted:
                    scores = _checked(scores, len(candidates))
            except Exception as error:
                self._failures.log(name, repr(error))
                continue
            if any(scores):
                pairs = zip(totals, scores, strict=True)
                totals = [total + weight * score for total, score in pairs]
            if decision is not None:
                for each, score in zip(candidates, scores, strict=True):
                    decision.scores.setdefault(each.name, {})[name] = weight * score
        return totals

    def _table_of(self, stage: Stage, candidates: Sequence[C]) -> ScoreTable:
        for one in self._tables:
            # They are compared by identity first, in a moment.
            if one.stage == stage and one.candidates == candidates:
                return one
        one = ScoreTable(stage, candidates, self._incremental)
        self._tables.appendleft(one)
        return one

    def _picked(self, request: SelectionRequest, candidates: Sequence[C], totals: list[float]) -> C:
        try:
            chosen = self._picker.pick(request, candidates, totals)
            if self._picker_name in self._trusted:
                return cast("C", chosen)
            return next(each for each in candidates if each is chosen)
        except Exception as error:
            self._failures.log(self._picker_name, repr(error))
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
