"""Request, candidates and plug-in kinds of a choice, and its reasons. Pure."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from epd_portable.config.roles import Stage, role_named
from epd_portable.media.limits import RequestItem
from epd_portable.placement.estimates import NO_PROMPT, Prompt
from epd_portable.placement.instances import Instance

SESSION_HEADER = "x-session-id"
"""Names a session: its requests go to the same instance or front while it has capacity."""
MOST_SHOWN = 16
"""Instances of one decision that are logged; the best ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionRequest:
    """For what an instance is chosen.

    Attributes:
        stage: That it is chosen for.
        key: Random bits of the front, one for each request: no client chooses by them.
        model: That the client names, or empty.
        session: The client's name for its conversation, or empty.
        item: For ``encode`` the one that is to be encoded.
        prompt: Its text, and its media by their content; empty where an item is to be encoded.
    """

    stage: Stage
    key: str
    model: str = ""
    session: str = ""
    items: Sequence[RequestItem] = ()
    item: RequestItem | None = None
    prompt: Prompt = NO_PROMPT

    @property
    def blocks(self) -> Sequence[int]:
        """The prompt's, see `Prompt`."""
        return self.prompt.blocks

    def cached_tokens(self, candidates: Candidates) -> list[int]:
        """Return how many of the prompt's first tokens each candidate most likely has."""
        return [self.prompt.up_to(each.cached.prefix(self.blocks)) for each in candidates]

    @property
    def affinity(self) -> str:
        """Key of requests that should go to the same instance."""
        if self.item is not None:
            return self.item.item_uuid
        return self.session or self.key

    def chance(self) -> float:
        """Return a number from 0 to below 1, always the same one; decides between equals."""
        # Another one for each item, so that the items of one request do not go the same way.
        text = f"{self.key}\0{self.item.item_uuid}" if self.item else self.key
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") / (1 << 64)


Candidates: TypeAlias = Sequence[Instance]


@functools.lru_cache(maxsize=1024)
def stages(role: str) -> frozenset[str]:
    """Return what a role serves; nothing for a word that is none."""
    named = role_named(role)
    return frozenset(named.split("-") if named else ())


# Kinds of plug-ins.


@runtime_checkable
class Filter(Protocol):
    """Leaves out candidates."""

    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        """Return those of the candidates that can have it, in their order; perhaps none."""


@runtime_checkable
class Scorer(Protocol):
    """Rates candidates."""

    def score(self, request: SelectionRequest, candidates: Candidates) -> Sequence[float]:
        """Return a number from 0 to 1 for each candidate; 1 is best."""


@runtime_checkable
class ScorePicker(Protocol):
    """Takes one of the rated candidates."""

    def pick(
        self, request: SelectionRequest, candidates: Candidates, scores: Sequence[float]
    ) -> Instance:
        """Return one of the candidates, of which there is at least one.

        Args:
            candidates: That the filters have left.
            scores: Of each, the weighted sum over the scorers.
        """


@runtime_checkable
class Decider(Protocol):
    """Decides whether a stage gets an instance of its own."""

    def disaggregate(self, request: SelectionRequest, decode: Instance | None) -> bool:
        """Return whether the request's stage is done apart from decoding.

        Args:
            request: Of stage ``encode``, with its item, or ``prefill``.
            decode: The instance that was chosen to decode, if there is one.
        """


# Why it was made.


@dataclass(kw_only=True, slots=True)
class Decision:
    """Decision for a stage, with its reasons.

    Attributes:
        item: Name of the item that is to be encoded, or empty.
        profile: That decided, or empty.
        header: Of a trusted hop, that decided or left only some; or empty.
        filters: How many instances there were, and how many each filter left.
        scores: What each scorer gave the instances in `totals`, times its weight.
        totals: The sums, of each instance that was left.
        reason: Why none was chosen, or why none was looked for.
    """

    stage: Stage
    item: str = ""
    profile: str = ""
    header: str = ""
    filters: dict[str, int] = field(default_factory=dict)
    scores: dict[str, list[float]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    winner: str = ""
    reason: str = ""

    def shown(self) -> dict[str, object]:
        """Return the decision as plain data."""
        names = list(self.totals)
        best = sorted(range(len(names)), key=lambda n: -self.totals[names[n]])[:MOST_SHOWN]
        scores = {
            names[n]: {
                **{scorer: round(given[n], 4) for scorer, given in self.scores.items()},
                "total": round(self.totals[names[n]], 4),
            }
            for n in best
        }
        said = {
            "stage": self.stage,
            "item": self.item[:16],
            "profile": self.profile,
            "header": self.header,
            "filters": self.filters,
            "scores": scores,
            "winner": self.winner or None,
            "reason": self.reason,
        }
        return {name: value for name, value in said.items() if value or name == "winner"}
