"""Scorers: who is better, from 0 to 1 each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from epd_portable.router.choice.filters import takes_type
from epd_portable.router.choice.plugin import NoParameters, Parameters, read_parameters
from epd_portable.router.choice.situation import Contender, Need, place

Count = Annotated[int, Field(ge=1)]
Part = Annotated[float, Field(ge=0, le=1, strict=False)]
Told = Literal["waiting", "running", "items", "pixels"]
"""What is compared of `Reported`."""

ENTRY_MIB = 2
"""One item's output in llm-d's measure of a cache."""
BYTES_A_TOKEN = 4
"""Of text, on average, in llm-d's measure of a block."""


# By load.


def loads(contenders: Sequence[Contender]) -> list[float]:
    """Return what each works on, in proportion to what it can do."""
    return [each.load / each.weight for each in contenders]


def reports(contenders: Sequence[Contender], what: Told) -> list[float] | None:
    """Return what each has said of itself, in proportion to what it can do.

    ``None`` unless all have: what one says and what the router counts of another do not compare.
    """
    found = []
    for each in contenders:
        told = None if each.reported is None else getattr(each.reported, what)
        if told is None:
            return None
        found.append(told / each.weight)
    return found


def _least(found: Sequence[float]) -> list[float]:
    """Return 1 for the least, 0 for the greatest, and even between them."""
    least, most = min(found), max(found)
    return [(most - one) / (most - least) if most > least else 1.0 for one in found]


class ActiveRequests(Parameters):
    """Of ``active-request-scorer``.

    Attributes:
        requestTimeout: Taken, and without effect: the router sees each request's end.
        idleThreshold: Up to so many requests an instance counts as idle.
        maxBusyScore: Best score of one that is not.
    """

    requestTimeout: JsonValue = None
    idleThreshold: Annotated[int, Field(ge=0)] = 0
    maxBusyScore: Part = 1.0


class ActiveRequestScorer:
    """``active-request-scorer``: the fewer requests of this router an instance works on.

    1 for an idle one, 0 for the busiest one.
    """

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        self._p = read_parameters(ActiveRequests, name, given)

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        found = loads(contenders)
        most = max(found)
        idle, best = self._p.idleThreshold, self._p.maxBusyScore
        return [1.0 if one <= idle else best * (most - one) / most for one in found]


class QueueScorer:
    """``queue-scorer``: 1 for the shortest queue, 0 for the longest, and even between them.

    Queues are those that the instances tell; of encode instances, of items. Where one does not
    tell, the router's own count of what each works on stands for all.

    Attributes:
        wants_loads: See `Policy`.
    """

    wants_loads = True
    _what: Told = "waiting"

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        read_parameters(NoParameters, name, given)

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        what: Told = "items" if need.stage == "encode" else self._what
        return _least(reports(contenders, what) or loads(contenders))


class RunningScorer(QueueScorer):
    """``running-requests-size-scorer``: the same by the requests that engines compute for."""

    _what = "running"


class KvCacheScorer:
    """``kv-cache-utilization-scorer``: the part of its KV cache that an instance says is free.

    Who does not tell gets the mean of those that do; 0 for all if none does.

    Attributes:
        wants_loads: See `Policy`.
    """

    wants_loads = True

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        read_parameters(NoParameters, name, given)

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        told = [each.reported for each in contenders]
        used = [one.kv_used if one is not None else None for one in told]
        known = [1 - one for one in used if one is not None]
        mean = sum(known) / len(known) if known else 0.0
        return [mean if one is None else 1 - one for one in used]


class EncodePixelsScorer:
    """``encode-pixels-scorer``: 1 for the encoder with the fewest pixels to do, 0 for the most.

    By items where one does not tell.

    Attributes:
        wants_loads: See `Policy`.
    """

    wants_loads = True

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        read_parameters(NoParameters, name, given)

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        return _least(reports(contenders, "pixels") or loads(contenders))


class LoadAware(Parameters):
    """Of ``load-aware-scorer``.

    Attributes:
        threshold: From so many requests on an instance counts as full.
    """

    threshold: Count = 128


class LoadAwareScorer:
    """``load-aware-scorer``: 0.5 where nothing waits, and 0 from a threshold on.

    By queues as `QueueScorer`.

    Attributes:
        wants_loads: See `Policy`.
    """

    wants_loads = True

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        self._full = read_parameters(LoadAware, name, given).threshold

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        found = reports(contenders, "items" if need.stage == "encode" else "waiting")
        return [0.5 * (1 - min(one / self._full, 1.0)) for one in found or loads(contenders)]


class EncodeLoad(Parameters):
    """Of ``encode-load-scorer``.

    Attributes:
        threshold: From so many items on an encoder counts as full.
        encoderType: Items that it has a say in: ``vision`` is images and videos; all by default.
    """

    threshold: Count = 10
    encoderType: Literal["vision", "image", "video", "audio"] | None = None


class EncodeLoadScorer:
    """``encode-load-scorer``: the fewer items an encoder has, the better.

    0 for one that is full, or of another type. By what encoders tell, as `QueueScorer`.

    Attributes:
        wants_loads: See `Policy`.
    """

    wants_loads = True

    _MODALITIES: Mapping[str, frozenset[str]] = {
        "vision": frozenset({"image", "video"}),
        "image": frozenset({"image"}),
        "video": frozenset({"video"}),
        "audio": frozenset({"audio"}),
    }

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        p = read_parameters(EncodeLoad, name, given)
        self._full = p.threshold
        self._type = p.encoderType

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        kind, item = self._type, need.item
        if kind is not None and item is not None and item.modality not in self._MODALITIES[kind]:
            return [0.0] * len(contenders)
        found = reports(contenders, "items") or loads(contenders)
        return [
            max(0.0, 1 - load / self._full) if kind is None or self._is_of(kind, each) else 0.0
            for each, load in zip(contenders, found, strict=True)
        ]

    @staticmethod
    def _is_of(kind: str, contender: Contender) -> bool:
        wanted = {kind, "vision"} if kind in ("image", "video") else {kind}
        return takes_type(contender, frozenset(wanted))


class EncodeTimeScorer:
    """``encode-time-scorer``: the sooner an encoder has done what it was given, in seconds.

    1 for one that has nothing, 0 for the one that needs longest.
    """

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        found = [each.owed_s / each.weight for each in contenders]
        most = max(found)
        return [1 - one / most if most > 0 else 1.0 for one in found]


# By what an instance has.


class PrefixCache(Parameters):
    """Of ``prefix-cache-scorer`` and its producers.

    Attributes:
        blockSizeTokens: Tokens of one block, of 4 bytes each.
        blockSize: The same, as it was called.
        maxPrefixBlocksToMatch: Blocks of a prompt that are looked at.
        maxPrefixTokensToMatch: The same in tokens.
        lruCapacityPerServer: Blocks that an instance keeps.
        autoTune: Taken, and without effect, as the next ones: the router looks at text, not at
            tokens, and counts what it has sent, not what engines report.
        prefixMatchInfoProducerName: See above.
        tokenProcessorConfig: See above.
        indexerConfig: See above.
        kvEventsConfig: See above.
    """

    blockSizeTokens: Count | None = None
    blockSize: Count | None = None
    maxPrefixBlocksToMatch: Count | None = None
    maxPrefixTokensToMatch: Count | None = None
    lruCapacityPerServer: Count | None = None
    autoTune: JsonValue = None
    prefixMatchInfoProducerName: JsonValue = None
    tokenProcessorConfig: JsonValue = None
    indexerConfig: JsonValue = None
    kvEventsConfig: JsonValue = None

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


class PrefixCacheScorer:
    """``prefix-cache-scorer``: the part of the prompt that the instance has computed before.

    Attributes:
        prefix: Its parameters.
        wants_blocks: See `Policy`.
    """

    wants_blocks = True

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        self.prefix = read_parameters(PrefixCache, name, given)

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        blocks = need.blocks
        if not blocks:
            return [0.0] * len(contenders)
        return [each.holdings.prefix(blocks) / len(blocks) for each in contenders]


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


class EmbeddingsCacheScorer:
    """``mm-embeddings-cache-scorer``: the part of the items that the instance has encoded, or had.

    Of one item that is to be encoded, that is 1 or 0.

    Attributes:
        embeddings: Its parameters.
    """

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        self.embeddings = read_parameters(EmbeddingsCache, name, given)

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


class SessionAffinity(Parameters):
    """Of ``session-affinity-scorer``: none of them has an effect.

    Attributes:
        headerName: A session's name is in ``x-session-id``.
    """

    headerName: JsonValue = None


class SessionAffinityScorer:
    """``session-affinity-scorer``: 1 for the instance that a session's name leads to.

    Nothing is remembered: every router leads it to the same one.
    """

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        read_parameters(SessionAffinity, name, given)

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


class ConsistentHashScorer:
    """``consistent-hash-scorer``: 1 for the instance that a key leads to, among those with room.

    The key is an item's name where one is to be encoded, so that a repeated picture meets the
    encoder that has it; else the session's, or the request's own. (Mirrokni and others, Consistent
    hashing with bounded loads, 2018.)
    """

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        self._bound = read_parameters(ConsistentHash, name, given).loadBound

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        key = need.affinity
        capacity = sum(each.weight for each in contenders)
        share = self._bound * (sum(each.load for each in contenders) + 1) / capacity
        near = [
            place(key, each) if each.load < math.ceil(share * each.weight) else 0.0
            for each in contenders
        ]
        return _first(contenders, near)


class WeightScorer:
    """``weight-scorer``: an instance's ``weight`` in proportion to the greatest one."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        read_parameters(NoParameters, name, given)

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """See `Scorer`."""
        most = max(each.weight for each in contenders)
        return [each.weight / most for each in contenders]


def _first(contenders: Sequence[Contender], near: Sequence[float]) -> list[float]:
    """Return 1 for the nearest one and 0 for the others."""
    best = max(range(len(contenders)), key=near.__getitem__)
    return [float(index == best) for index in range(len(contenders))]
