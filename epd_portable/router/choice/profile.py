"""One stage's choice: filters, then scorers, then a picker, and what each of them said."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from epd_portable.router.choice.pickers import MaxScorePicker
from epd_portable.router.choice.plugin import Filter, ScorePicker, Scorer
from epd_portable.router.choice.situation import Contender, Need, Stage
from epd_portable.router.choice.standing import Standing, StandingScorer
from epd_portable.router.choice.tokens import NoHitLruScorer

logger = logging.getLogger(__name__)

SAID_EVERY_S = 60.0
"""A plug-in that fails is said to do so no more often than this."""
MOST_STANDING = 4
"""Groups of contenders whose scores are kept: filters may leave others for the next request."""
MOST_SHOWN = 16
"""Instances of one decision that are explained; the best ones."""

C = TypeVar("C", bound=Contender)


@dataclass(kw_only=True, slots=True)
class Decision:
    """What was decided for a stage, and why.

    Attributes:
        stage: Of the request.
        item: Name of the item that is to be encoded, or empty.
        profile: That decided, or empty.
        header: Of a trusted hop, that decided or left only some; or empty.
        filters: How many instances there were, and how many each filter left.
        scores: What each scorer gave the instances that were left, times its weight, by instance.
        totals: Their sums.
        winner: The instance, or empty.
        reason: Why it is nobody, or why nobody was looked for.
    """

    stage: Stage
    item: str = ""
    profile: str = ""
    header: str = ""
    filters: dict[str, int] = field(default_factory=dict)
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    winner: str = ""
    reason: str = ""

    def shown(self) -> dict[str, object]:
        """Return what there is to say, as plain data."""
        best = sorted(self.totals, key=lambda name: -self.totals[name])[:MOST_SHOWN]
        said: dict[str, object] = {"stage": self.stage}
        if self.item:
            said["item"] = self.item[:16]
        if self.profile:
            said["profile"] = self.profile
        if self.header:
            said["header"] = self.header
        if self.filters:
            said["filters"] = self.filters
        if best:
            said["scores"] = {
                name: {
                    **{each: round(one, 4) for each, one in self.scores.get(name, {}).items()},
                    "total": round(self.totals[name], 4),
                }
                for name in best
            }
        said["winner"] = self.winner or None
        if self.reason:
            said["reason"] = self.reason
        return said


class Failures:
    """Says which plug-ins have failed, each at most every `SAID_EVERY_S`.

    Args:
        where: They were used, for the log.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._until: dict[str, float] = {}

    def say(self, name: str, problem: str) -> None:
        """Log that a plug-in has failed, unless that was said lately."""
        now = time.monotonic()
        if now >= self._until.get(name, -math.inf):
            self._until[name] = now + SAID_EVERY_S
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
        trusted: Names of those that answer what they should, so that nobody checks it.
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
        self._standing_scorers = {
            key: (scorer, weight)
            for key, (scorer, weight) in scorers.items()
            if isinstance(scorer, StandingScorer) and key in trusted
        }
        self._scorers = {k: each for k, each in scorers.items() if k not in self._standing_scorers}
        self._standing: deque[Standing] = deque(maxlen=MOST_STANDING)
        self._picker_name, self._picker = picker or ("max-score-picker", MaxScorePicker("", {}))
        self._trusted = trusted
        self._lru = [one for one, _ in scorers.values() if isinstance(one, NoHitLruScorer)]
        self._failures = Failures(f"profile {name}")

    def choose(
        self, need: Need, contenders: Sequence[C], decision: Decision | None = None
    ) -> C | None:
        """Return who should have it.

        Args:
            need: What is asked.
            contenders: Who is there.
            decision: Is told why.

        Returns:
            One of the contenders; ``None`` if there is none, or filters leave none.
        """
        if decision is not None:
            decision.profile = self.name
            decision.filters["there"] = len(contenders)
        left = contenders
        for name, one in self._filters.items():
            if not left:
                break
            left = self._kept(name, one, need, left)
            if decision is not None:
                decision.filters[name] = len(left)
        if not left:
            if decision is not None:
                decision.reason = "nobody is left" if contenders else "nobody is there"
            return None
        totals = self._scored(need, left, decision)
        chosen = self._picked(need, left, totals)
        for each in self._lru:
            each.picked(chosen)
        if decision is not None:
            decision.totals = {each.name: total for each, total in zip(left, totals, strict=True)}
            decision.winner = chosen.name
        return chosen

    def _kept(self, name: str, one: Filter, need: Need, contenders: Sequence[C]) -> Sequence[C]:
        try:
            kept = one.keep(need, contenders)
            if name in self._trusted:
                return cast("Sequence[C]", kept)
            names = {each.name for each in kept}
        except Exception as error:
            self._failures.say(name, repr(error))
            return contenders
        return [each for each in contenders if each.name in names]

    def _scored(
        self, need: Need, contenders: Sequence[C], decision: Decision | None
    ) -> list[float]:
        standing = self._standing_of(need.stage, contenders)
        totals = standing.totals()
        if decision is not None:
            for name, parts in standing.parts().items():
                for each, part in zip(contenders, parts, strict=True):
                    decision.scores.setdefault(each.name, {})[name] = part
        for name, (one, weight) in self._scorers.items():
            try:
                scores = one.score(need, contenders)
                if name not in self._trusted:
                    scores = _checked(scores, len(contenders))
            except Exception as error:
                self._failures.say(name, repr(error))
                continue
            if any(scores):
                pairs = zip(totals, scores, strict=True)
                totals = [total + weight * score for total, score in pairs]
            if decision is not None:
                for each, score in zip(contenders, scores, strict=True):
                    decision.scores.setdefault(each.name, {})[name] = weight * score
        return totals

    def _standing_of(self, stage: Stage, contenders: Sequence[C]) -> Standing:
        for one in self._standing:
            # They are compared by identity first, in a moment.
            if one.stage == stage and one.contenders == contenders:
                return one
        one = Standing(stage, contenders, self._standing_scorers)
        self._standing.appendleft(one)
        return one

    def _picked(self, need: Need, contenders: Sequence[C], totals: list[float]) -> C:
        try:
            chosen = self._picker.pick(need, contenders, totals)
            if self._picker_name in self._trusted:
                return cast("C", chosen)
            return next(each for each in contenders if each is chosen)
        except Exception as error:
            self._failures.say(self._picker_name, repr(error))
            return contenders[max(range(len(totals)), key=totals.__getitem__)]


def _checked(scores: Sequence[float], count: int) -> list[float]:
    """Return scores between 0 and 1.

    Raises:
        ValueError: They are no numbers, or not so many.
    """
    found = [float(score) for score in scores]
    if len(found) != count or not all(map(math.isfinite, found)):
        raise ValueError(f"answered {found[:8]!r} for {count} contenders")
    return [min(max(score, 0.0), 1.0) for score in found]
