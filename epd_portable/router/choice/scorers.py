"""Scorers: who is better, from 0 to 1 each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from epd_portable.router.choice.filters import SessionAffinity, takes_type
from epd_portable.router.choice.plugin import BuiltIn, NoParameters, P, Parameters, Vain
from epd_portable.router.choice.situation import Contender, Need, Stage, place
from epd_portable.router.choice.standing import StandingScorer
from epd_portable.router.choice.tokens import Count, Part, cached_tokens

Told = Literal["waiting", "running", "items", "pixels"]
"""What is compared of `Reported`."""

ENTRY_MIB = 2
"""One item's output in llm-d's measure of a cache."""


# By load.


def loads(contenders: Sequence[Contender]) -> list[float]:
    """Return what each works on, in proportion to what it can do."""
    return [each.load / each.weight for each in contenders]


def reports(contenders: Sequence[Contender], what: Told) -> list[float] | None:
    """Return what each has said of itself, in proportion to what it can do.

    ``None`` unless all have: what one says and what the router counts of another do not compare.
    """
    told = [_told(each, what) for each in contenders]
    return None if None in told else cast("list[float]", told)


def _told(contender: Contender, what: Told) -> float | None:
    told = None if contender.reported is None else getattr(contender.reported, what)
    return None if told is None else told / contender.weight


class ActiveRequests(Parameters):
    """Of ``active-request-scorer``.

    Attributes:
        requestTimeout: The router sees each request's end.
        inFlightLoadProducerName: It counts by itself.
        idleThreshold: Up to so many requests an instance counts as idle.
        maxBusyScore: Best score of one that is not.
    """

    requestTimeout: Vain = None
    inFlightLoadProducerName: Vain = None
    idleThreshold: Annotated[int, Field(ge=0)] = 0
    maxBusyScore: Part = 1.0


class ActiveRequestScorer(BuiltIn[ActiveRequests], StandingScorer):
    """``active-request-scorer``: the fewer requests of this router an instance works on.

    1 for an idle one, 0 for the busiest one.
    """

    takes = ActiveRequests

    def measure(self, stage: Stage, contender: Contender) -> float:
        """See `StandingScorer`."""
        return contender.load / contender.weight

    def scale(self, measures: Sequence[float]) -> float:
        """See `StandingScorer`."""
        return max(measures)

    def rate(self, measures: Sequence[float], scale: float) -> list[float]:
        """See `StandingScorer`."""
        idle, best = self.p.idleThreshold, self.p.maxBusyScore
        return [1.0 if one <= idle else best * (scale - one) / scale for one in measures]


_Both = tuple[float | None, float]
"""What a contender tells of itself, and its load as the router counts it."""


class _ByReports(BuiltIn[P], StandingScorer):
    """By what the instances tell; where one does not tell, by the router's own count for all.

    Attributes:
        wants_loads: See `Policy`.
    """

    wants_loads = True
    _what: Told = "waiting"

    def measure(self, stage: Stage, contender: Contender) -> _Both:
        """See `StandingScorer`."""
        # Queues of encode instances are such of items.
        what: Told = "items" if stage == "encode" and self._what != "pixels" else self._what
        return _told(contender, what), contender.load / contender.weight

    def scale(self, measures: Sequence[_Both]) -> tuple[int, float, float]:
        """Return which of both counts for all, its least and its most."""
        found: list[Any] = [told for told, _ in measures]
        which = int(None in found)
        if which:
            found = [load for _, load in measures]
        return which, min(found), max(found)

    def rate(self, measures: Sequence[Any], scale: tuple[int, float, float]) -> list[float]:
        """Return 1 for the least, 0 for the most, and even between them."""
        which, least, most = scale
        span = most - least
        if not span:
            return [1.0] * len(measures)
        return [(most - one[which]) / span for one in measures]


class QueueScorer(_ByReports[NoParameters]):
    """``queue-scorer``: 1 for the shortest queue, 0 for the longest, and even between them.

    Queues are those that the instances tell; of encode instances, of items. Where one does not
    tell, the router's own count of what each works on stands for all.
    """

    takes = NoParameters


class RunningScorer(_ByReports[NoParameters]):
    """``running-requests-size-scorer``: the same by the requests that engines compute for."""

    takes = NoParameters
    _what = "running"


class EncodePixelsScorer(_ByReports[NoParameters]):
    """``encode-pixels-scorer``: 1 for the encoder with the fewest pixels to do, 0 for the most.

    By items where one does not tell.
    """

    takes = NoParameters
    _what = "pixels"


class LoadAware(Parameters):
    """Of ``load-aware-scorer``.

    Attributes:
        threshold: From so many requests on an instance counts as full.
    """

    threshold: Count = 128


class LoadAwareScorer(_ByReports[LoadAware]):
    """``load-aware-scorer``: 0.5 where nothing waits, and 0 from a threshold on.

    By queues as `QueueScorer`.
    """

    takes = LoadAware

    def scale(self, measures: Sequence[_Both]) -> tuple[int, float, float]:
        """Return which of both counts for all, and the ends of the scale."""
        return int(any(told is None for told, _ in measures)), 0.0, float(self.p.threshold)

    def rate(self, measures: Sequence[Any], scale: tuple[int, float, float]) -> list[float]:
        """See `StandingScorer`."""
        which, _, full = scale
        return [0.5 * (1 - min(one[which] / full, 1.0)) for one in measures]


class KvCacheScorer(BuiltIn[NoParameters], StandingScorer):
    """``kv-cache-utilization-scorer``: the part of its KV cache that an instance says is free.

    Who does not tell gets the mean of those that do; 0 for all if none does.

    Attributes:
        wants_loads: See `Policy`.
    """

    takes = NoParameters
    wants_loads = True

    def measure(self, stage: Stage, contender: Contender) -> float | None:
        """See `StandingScorer`."""
        used = None if contender.reported is None else contender.reported.kv_used
        return None if used is None else 1 - used

    def scale(self, measures: Sequence[float | None]) -> float:
        """Return what is given to who does not tell."""
        if None not in measures:
            return 0.0
        known = [one for one in measures if one is not None]
        return sum(known) / len(known) if known else 0.0

    def rate(self, measures: Sequence[float | None], scale: float) -> list[float]:
        """See `StandingScorer`."""
        return [scale if one is None else one for one in measures]


class EncodeLoad(Parameters):
    """Of ``encode-load-scorer``.

    Attributes:
        threshold: From so many items on an encoder counts as full.
        encoderType: Items that it has a say in: ``vision`` is images and videos; all by default.
    """

    threshold: Count = 10
    encoderType: Literal["vision", "image", "video", "audio"] | None = None


class EncodeLoadScorer(BuiltIn[EncodeLoad]):
    """``encode-load-scorer``: the fewer items an encoder has, the better.

    0 for one that is full, or of another type. By what encoders tell, as `QueueScorer`.

    Attributes:
        wants_loads: See `Policy`.
    """

    takes = EncodeLoad
    wants_loads = True

    _MODALITIES: Mapping[str, frozenset[str]] = {
        "vision": frozenset({"image", "video"}),
        "image": frozenset({"image"}),
        "video": frozenset({"video"}),
        "audio": frozenset({"audio"}),
    }

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        kind, item, full = self.p.encoderType, need.item, self.p.threshold
        if kind is not None and item is not None and item.modality not in self._MODALITIES[kind]:
            return [0.0] * len(contenders)
        found = reports(contenders, "items") or loads(contenders)
        return [
            max(0.0, 1 - load / full) if kind is None or self._is_of(kind, each) else 0.0
            for each, load in zip(contenders, found, strict=True)
        ]

    @staticmethod
    def _is_of(kind: str, contender: Contender) -> bool:
        wanted = {kind, "vision"} if kind in ("image", "video") else {kind}
        return takes_type(contender, frozenset(wanted))


class EncodeTimeScorer(BuiltIn[NoParameters], StandingScorer):
    """``encode-time-scorer``: the sooner an encoder has done what it was given, in seconds.

    1 for one that has nothing, 0 for the one that needs longest.
    """

    takes = NoParameters

    def measure(self, stage: Stage, contender: Contender) -> float:
        """See `StandingScorer`."""
        return contender.owed_s / contender.weight

    def scale(self, measures: Sequence[float]) -> float:
        """See `StandingScorer`."""
        return max(measures)

    def rate(self, measures: Sequence[float], scale: float) -> list[float]:
        """See `StandingScorer`."""
        return [1 - one / scale if scale > 0 else 1.0 for one in measures]


# By what an instance has.


class PrefixCache(Parameters):
    """Of ``prefix-cache-scorer`` and its producers.

    Attributes:
        blockSizeTokens: Tokens of one block, of 4 bytes each.
        blockSize: The same, as it was called.
        maxPrefixBlocksToMatch: Blocks of a prompt that are looked at.
        maxPrefixTokensToMatch: The same in tokens.
        lruCapacityPerServer: Blocks that an instance keeps.
        autoTune: As the next ones, of what the router does not do: it looks at text, not at tokens,
            and counts what it has sent, not what engines report.
    """

    blockSizeTokens: Count | None = None
    blockSize: Count | None = None
    maxPrefixBlocksToMatch: Count | None = None
    maxPrefixTokensToMatch: Count | None = None
    lruCapacityPerServer: Count | None = None
    autoTune: Vain = None
    prefixMatchInfoProducerName: Vain = None
    tokenProcessorConfig: Vain = None
    indexerConfig: Vain = None
    kvEventsConfig: Vain = None
    speculativeIndexing: Vain = None

    @property
    def block_tokens(self) -> int | None:
        """Tokens of one block, if it is said."""
        return self.blockSizeTokens or self.blockSize

    def most_blocks(self, block_tokens: int) -> int | None:
        """Return how many blocks are looked at, if it is said."""
        if self.maxPrefixBlocksToMatch is not None:
            return self.maxPrefixBlocksToMatch
        if self.maxPrefixTokensToMatch is not None:
            return max(1, self.maxPrefixTokensToMatch // block_tokens)
        return None


class PrefixCacheScorer(BuiltIn[PrefixCache]):
    """``prefix-cache-scorer``: the part of the prompt that the instance has computed before.

    Attributes:
        wants_blocks: See `Policy`.
    """

    takes = PrefixCache
    wants_blocks = True

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        whole = need.up_to(len(need.blocks)) or 1
        return [tokens / whole for tokens in cached_tokens(need, contenders)]


class EmbeddingsCache(Parameters):
    """Of ``mm-embeddings-cache-scorer`` and its producer.

    Attributes:
        cacheSizeInMBPerServer: What an instance keeps, at 2 MiB an item.
        cacheSizeInMB: The same, as it was called.
    """

    cacheSizeInMBPerServer: Annotated[int, Field(ge=ENTRY_MIB)] | None = None
    cacheSizeInMB: Annotated[int, Field(ge=ENTRY_MIB)] | None = None

    @property
    def items(self) -> int | None:
        """Items that an instance keeps, if it is said."""
        size = self.cacheSizeInMBPerServer or self.cacheSizeInMB
        return size // ENTRY_MIB if size else None


class EmbeddingsCacheScorer(BuiltIn[EmbeddingsCache]):
    """``mm-embeddings-cache-scorer``: the part of the items that the instance has encoded, or had.

    Of one item that is to be encoded, that is 1 or 0.
    """

    takes = EmbeddingsCache

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        if need.item is not None:
            name = need.item.mm_hash
            return [float(name in each.holdings.items) for each in contenders]
        names = [item.mm_hash for item in need.items]
        if not names:
            return [0.0] * len(contenders)
        return [
            sum(name in each.holdings.items for name in names) / len(names) for each in contenders
        ]


# By who it is.


class SessionAffinityScorer(BuiltIn[SessionAffinity]):
    """``session-affinity-scorer``: 1 for the instance that a session's name leads to.

    Nothing is remembered: every router leads it to the same one.
    """

    takes = SessionAffinity

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        if not need.session:
            return [0.0] * len(contenders)
        return _first(contenders, [place(need.session, each) for each in contenders])


class ConsistentHash(Parameters):
    """Of ``consistent-hash-scorer``.

    Attributes:
        loadBound: Nobody gets more than this multiple of its share of the load.
    """

    loadBound: Annotated[float, Field(gt=1, le=1e6, strict=False)] = 1.25


class ConsistentHashScorer(BuiltIn[ConsistentHash]):
    """``consistent-hash-scorer``: 1 for the instance that a key leads to, among those with room.

    The key is an item's name where one is to be encoded, so that a repeated picture meets the
    encoder that has it; else the session's, or the request's own. (Mirrokni and others, Consistent
    hashing with bounded loads, 2018.)
    """

    takes = ConsistentHash

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        key = need.affinity
        capacity = sum(each.weight for each in contenders)
        share = self.p.loadBound * (sum(each.load for each in contenders) + 1) / capacity
        near = [
            place(key, each) if each.load < math.ceil(share * each.weight) else 0.0
            for each in contenders
        ]
        return _first(contenders, near)


class WeightScorer(BuiltIn[NoParameters], StandingScorer):
    """``weight-scorer``: an instance's ``weight`` in proportion to the greatest one."""

    takes = NoParameters

    def measure(self, stage: Stage, contender: Contender) -> float:
        """See `StandingScorer`."""
        return contender.weight

    def scale(self, measures: Sequence[float]) -> float:
        """See `StandingScorer`."""
        return max(measures)

    def rate(self, measures: Sequence[float], scale: float) -> list[float]:
        """See `StandingScorer`."""
        return [one / scale for one in measures]


def _first(contenders: Sequence[Contender], near: Sequence[float]) -> list[float]:
    """Return 1 for the nearest one and 0 for the others."""
    best = max(range(len(contenders)), key=near.__getitem__)
    return [float(index == best) for index in range(len(contenders))]
