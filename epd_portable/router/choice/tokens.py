"""Choices by tokens: of a prompt, in caches, and in flight; in llm-d's measure of them."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from epd_portable.media.formats import Modality
from epd_portable.router.choice.holdings import Recent
from epd_portable.router.choice.plugin import BuiltIn, Parameters, Vain
from epd_portable.router.choice.situation import AskedItem, Contender, Need

Count = Annotated[int, Field(ge=1)]
Part = Annotated[float, Field(ge=0, le=1, strict=False)]

_FRAME = 640 * 360
_UNSEEN_PIXELS: Mapping[Modality, int] = {"image": 0, "video": 20 * _FRAME, "audio": 139 * 1024}
"""What an item counts for whose pixels nobody knows; a picture as the configuration says."""


class Resolution(Parameters):
    """Of a picture that nobody has looked into."""

    width: Count = 640
    height: Count = 360


class Dynamic(Parameters):
    """Pixels of one token."""

    factor: Count = 1024


class Static(Parameters):
    """Tokens of one picture."""

    staticToken: Count = 1


class OfPictures(Parameters):
    """How many tokens a picture is taken for."""

    mode: Literal["dynamic", "static"] = "dynamic"
    defaultResolution: Resolution = Resolution()
    dynamic: Dynamic = Dynamic()
    static: Static = Static()


class Estimate(Parameters):
    """How many tokens items are taken for; of videos and clips, that cannot be changed."""

    image: OfPictures = OfPictures()
    video: Vain = None
    audio: Vain = None


class Tokens(Parameters):
    """Of ``token-producer``; all that does not estimate is of no use here."""

    model_config = ConfigDict(extra="allow")

    estimate: Estimate = Estimate()

    def vain(self) -> list[str]:
        """See `Parameters`."""
        return super().vain() + [f"estimate.{name}" for name in self.estimate.vain()]

    def of(self, item: AskedItem) -> int:
        """Return how many tokens an item is taken for; at least one."""
        image = self.estimate.image
        if item.modality == "image" and image.mode == "static":
            return image.static.staticToken
        size = image.defaultResolution
        unseen = _UNSEEN_PIXELS[item.modality] or size.width * size.height
        return max(1, (item.pixels or unseen) // image.dynamic.factor)


class TokenSource(BuiltIn[Tokens]):
    """``token-producer``: says how many tokens pictures are taken for."""

    takes = Tokens


def cached_tokens(need: Need, contenders: Sequence[Contender]) -> list[int]:
    """Return how many of the prompt's first tokens each contender most likely has."""
    blocks, found, matched = need.blocks, [0] * len(contenders), 0
    if blocks:
        having = need.having
        if having is None:
            having = {each.holdings for each in contenders if blocks[0] in each.holdings.blocks}
        if not having:
            return found
        for index in [i for i, each in enumerate(contenders) if each.holdings in having]:
            # Mostly as many as another one has: of a system prompt, say.
            matched = contenders[index].holdings.prefix(blocks, matched)
            found[index] = need.up_to(matched)
    return found


class PrefixAffinity(Parameters):
    """Of ``prefix-cache-affinity-filter``.

    Attributes:
        affinityThreshold: Part of the prompt from which on an instance counts as having it.
        explorationProbability: How often all are kept all the same.
        maxTTFTPenaltyMs: Who has the prompt may need so much longer for what is in flight than who
            has it not; 0 is for ever.
        ttftSource: Only by throughput: nothing predicts latencies here.
        peakPrefillThroughput: Tokens that an instance prefills in a second.
    """

    affinityThreshold: Part = 0.8
    explorationProbability: Part = 0.0
    maxTTFTPenaltyMs: Annotated[float, Field(ge=0, strict=False)] = 18_000.0
    ttftSource: Literal["prefillThroughput"] = "prefillThroughput"
    peakPrefillThroughput: Annotated[float, Field(ge=0, strict=False)] = 15_928.0
    maxTokensInFlightPenalty: Vain = None
    prefillCalibrationFile: Vain = None
    prefillCalibrationFingerprint: Vain = None
    prefillCalibrationRequired: Vain = None
    prefixMatchInfoProducerName: Vain = None
    latencyPredictionInfoProducerName: Vain = None
    inFlightLoadProducerName: Vain = None

    @model_validator(mode="after")
    def _penalties_need_a_throughput(self) -> PrefixAffinity:
        if self.maxTTFTPenaltyMs and not self.peakPrefillThroughput:
            raise ValueError("peakPrefillThroughput must be more than 0, or maxTTFTPenaltyMs 0")
        return self


class PrefixAffinityFilter(BuiltIn[PrefixAffinity]):
    """``prefix-cache-affinity-filter``: who has the prompt, unless others are much less busy.

    Attributes:
        wants_blocks: See `Policy`.
    """

    takes = PrefixAffinity
    wants_blocks = True

    def keep(self, need: Need, contenders: Sequence[Contender]) -> Sequence[Contender]:
        """See `Filter`."""
        p = self.p
        if not need.blocks or random.random() < p.explorationProbability:
            return contenders
        wanted = p.affinityThreshold * need.up_to(len(need.blocks))
        cached = cached_tokens(need, contenders)
        if max(cached, default=0) < wanted:
            return contenders
        having = [each for each, tokens in zip(contenders, cached, strict=True) if tokens >= wanted]
        pairs = zip(contenders, cached, strict=True)
        others = [each for each, tokens in pairs if tokens < wanted]
        if others and p.maxTTFTPenaltyMs:
            more = min(map(_in_flight, having)) - min(map(_in_flight, others))
            if more / p.peakPrefillThroughput * 1000 > p.maxTTFTPenaltyMs:
                return contenders
        return having


class TokenLoad(Parameters):
    """Of ``token-load-scorer``.

    Attributes:
        queueThresholdTokens: From so many on an instance counts as full.
    """

    queueThresholdTokens: Count = 4 << 20
    nonTextTokenWeight: Vain = 1.0
    inFlightLoadProducerName: Vain = None


class TokenLoadScorer(BuiltIn[TokenLoad]):
    """``token-load-scorer``: the fewer tokens an instance has to prefill, with this request's.

    Attributes:
        wants_blocks: See `Policy`.
    """

    takes = TokenLoad
    wants_blocks = True

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        own, full = need.tokens, self.p.queueThresholdTokens
        cached = cached_tokens(need, contenders)
        found = [
            1 - (each.tokens + own - known) / each.weight / full
            for each, known in zip(contenders, cached, strict=True)
        ]
        return [max(0.0, score) for score in found] if min(found) < 0 else found


class NoHitLru(Parameters):
    """Of ``no-hit-lru-scorer``.

    Attributes:
        lruSize: Instances that are remembered.
    """

    lruSize: Count = 1024
    prefixPluginType: Vain = None
    prefixPluginName: Vain = None
    prefixMatchInfoProducerName: Vain = None


class NoHitLruScorer(BuiltIn[NoHitLru]):
    """``no-hit-lru-scorer``: a prompt that nobody has goes to who got no such one for longest.

    0.5 for all where somebody has a part of it.

    Attributes:
        wants_blocks: See `Policy`.
    """

    takes = NoHitLru
    wants_blocks = True

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        super().__init__(name, given)
        self._last: Recent[str] = Recent(self.p.lruSize)
        self._is_new = False

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        self._is_new = not any(cached_tokens(need, contenders))
        if not self._is_new:
            return [0.5] * len(contenders)
        if len(contenders) == 1:
            return [1.0]
        last = {name: rank for rank, name in enumerate(self._last)}
        ranks = [last.get(each.name, -1) for each in contenders]
        never = [index for index, rank in enumerate(ranks) if rank < 0]
        for place, index in enumerate(never):
            ranks[index] = place - len(never)
        return [max(0.0, 1 - (rank + len(never)) / (len(ranks) - 1)) for rank in ranks]

    def picked(self, contender: Contender) -> None:
        """Note who gets the request that was scored for last."""
        if self._is_new:
            self._last.use((contender.name,))


class ContextLength(Parameters):
    """Of ``context-length-aware``.

    Attributes:
        label: That names the prompts an instance is for: ``0-2048``, in tokens.
        enableFiltering: Whether others do not get them at all.
    """

    label: Annotated[str, Field(min_length=1)] = "llm-d.ai/context-length-range"
    enableFiltering: bool = False
    reusableTokensProducerName: Vain = None


class ContextLengthAware(BuiltIn[ContextLength]):
    """``context-length-aware``: instances that are labelled for prompts of this length.

    Attributes:
        wants_blocks: See `Policy`.
    """

    takes = ContextLength
    wants_blocks = True

    def keep(self, need: Need, contenders: Sequence[Contender]) -> Sequence[Contender]:
        """See `Filter`."""
        if not self.p.enableFiltering:
            return contenders
        ranges = [_range(each.labels.get(self.p.label)) for each in contenders]
        return [
            each
            for each, (least, most) in zip(contenders, ranges, strict=True)
            if least <= need.tokens <= most
        ]

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """Return 0.3 to 1 within a range, less outside, 0.5 for who has no label."""
        return [self._score(need.tokens, each.labels.get(self.p.label)) for each in contenders]

    @staticmethod
    def _score(tokens: int, label: str | None) -> float:
        if label is None:
            return 0.5
        least, most = _range(label)
        if most < least:
            return 0.0
        if least <= tokens <= most:
            width = most - least
            narrow, room = 1 / (1 + width / 10_000), (most - tokens) / (width or 1)
            return 0.3 + 0.7 * (0.7 * narrow + 0.3 * room) if width else 1.0
        return 0.3 / (1 + max(tokens - most, least - tokens) / 1000)


@functools.lru_cache(maxsize=1024)
def _range(label: str | None) -> tuple[float, float]:
    """Return the least and the most tokens; of a label that says none, nothing is between them."""
    if label is None:
        return 0, float("inf")
    parts = [part.strip() for part in label.split("-")]
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        return 1, 0
    return int(parts[0]), int(parts[1])


def _in_flight(contender: Contender) -> float:
    return contender.tokens / contender.weight
