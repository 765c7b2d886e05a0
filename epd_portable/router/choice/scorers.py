"""Built-in scorers: 0 to 1 for each candidate, 1 for the best; see docs/choice.md."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from epd_portable.delivery.caches import Recent
from epd_portable.delivery.ring import LOAD_BOUND, HashRing
from epd_portable.router.choice.filters import SessionAffinity, takes_type
from epd_portable.router.choice.incremental import IncrementalScorer
from epd_portable.router.choice.parameters import (
    BuiltIn,
    Count,
    Factory,
    Ignored,
    NoParameters,
    P,
    Parameters,
    Part,
)
from epd_portable.router.choice.selection_types import (
    Candidate,
    Candidates,
    SelectionRequest,
    Stage,
)
from epd_portable.router.choice.tokens import cached_tokens

Reported = Literal["waiting", "running", "items", "pixels"]
"""What is compared of a load report."""

ENTRY_MIB = 2
"""One item's output in llm-d's measure of a cache."""


# By load.


def _reported(candidate: Candidate, what: Reported) -> float | None:
    """Return what a candidate reports, in proportion to what it can do."""
    value = None if candidate.reported is None else getattr(candidate.reported, what)
    return None if value is None else value / candidate.weight


class _ActiveRequests(Parameters):
    """Up to `idleThreshold` requests are idle; the best of the others gets `maxBusyScore`."""

    requestTimeout: Ignored = None
    inFlightLoadProducerName: Ignored = None
    idleThreshold: Annotated[int, Field(ge=0)] = 0
    maxBusyScore: Part = 1.0


class _ActiveRequestScorer(BuiltIn[_ActiveRequests], IncrementalScorer):
    takes = _ActiveRequests

    def measure(self, stage: Stage, candidate: Candidate) -> float:
        return candidate.load / candidate.weight

    def scale(self, measures: Sequence[float]) -> float:
        return max(measures)

    def rate(self, measures: Sequence[float], scale: float) -> list[float]:
        idle, best = self.p.idleThreshold, self.p.maxBusyScore
        return [1.0 if one <= idle else best * (scale - one) / scale for one in measures]


_Both = tuple[float | None, float]
"""What a candidate reports, and its load as the router counts it."""


class _ByReports(BuiltIn[P], IncrementalScorer):
    """By what the candidates report; where one does not, by the router's own count for all."""

    wants_loads = True
    what: Reported = "waiting"

    def measure(self, stage: Stage, candidate: Candidate) -> _Both:
        # Queues of encode instances are such of items.
        what: Reported = "items" if stage == "encode" and self.what != "pixels" else self.what
        return _reported(candidate, what), candidate.load / candidate.weight

    def scale(self, measures: Sequence[_Both]) -> tuple[int, float, float]:
        """Return which of both counts for all, its least and its most."""
        found: list[Any] = [reported for reported, _ in measures]
        which = int(None in found)
        if which:
            found = [load for _, load in measures]
        return which, min(found), max(found)

    def rate(self, measures: Sequence[Any], scale: tuple[int, float, float]) -> list[float]:
        which, least, most = scale
        span = most - least
        if not span:
            return [1.0] * len(measures)
        return [(most - one[which]) / span for one in measures]


class _QueueScorer(_ByReports[NoParameters]):
    takes = NoParameters


class _RunningScorer(_ByReports[NoParameters]):
    takes = NoParameters
    what = "running"


class _EncodePixelsScorer(_ByReports[NoParameters]):
    takes = NoParameters
    what = "pixels"


class _LoadAware(Parameters):
    threshold: Count = 128


class _LoadAwareScorer(_ByReports[_LoadAware]):
    takes = _LoadAware

    def scale(self, measures: Sequence[_Both]) -> tuple[int, float, float]:
        return int(any(reported is None for reported, _ in measures)), 0.0, self.p.threshold

    def rate(self, measures: Sequence[Any], scale: tuple[int, float, float]) -> list[float]:
        which, _, full = scale
        return [0.5 * (1 - min(one[which] / full, 1.0)) for one in measures]


class _KvCacheScorer(BuiltIn[NoParameters], IncrementalScorer):
    takes = NoParameters
    wants_loads = True

    def measure(self, stage: Stage, candidate: Candidate) -> float | None:
        used = None if candidate.reported is None else candidate.reported.kv_used
        return None if used is None else 1 - used

    def scale(self, measures: Sequence[float | None]) -> float:
        """Return what those get that do not report."""
        if None not in measures:
            return 0.0
        known = [one for one in measures if one is not None]
        return sum(known) / len(known) if known else 0.0

    def rate(self, measures: Sequence[float | None], scale: float) -> list[float]:
        return [scale if one is None else one for one in measures]


class _EncodeLoad(Parameters):
    threshold: Count = 10
    encoderType: Literal["vision", "image", "video", "audio"] | None = None


class _EncodeLoadScorer(BuiltIn[_EncodeLoad]):
    takes = _EncodeLoad
    wants_loads = True

    _MODALITIES: Mapping[str, frozenset[str]] = {
        "vision": frozenset({"image", "video"}),
        "image": frozenset({"image"}),
        "video": frozenset({"video"}),
        "audio": frozenset({"audio"}),
    }

    def score(self, request: SelectionRequest, candidates: Candidates) -> Sequence[float]:
        kind, item, full = self.p.encoderType, request.item, self.p.threshold
        if kind is not None and item is not None and item.modality not in self._MODALITIES[kind]:
            return [0.0] * len(candidates)
        found = [_reported(each, "items") for each in candidates]
        if None in found:
            found = [each.load / each.weight for each in candidates]
        return [
            max(0.0, 1 - load / full) if kind is None or self._is_of(kind, each) else 0.0
            for each, load in zip(candidates, cast("list[float]", found), strict=True)
        ]

    @staticmethod
    def _is_of(kind: str, candidate: Candidate) -> bool:
        wanted = {kind, "vision"} if kind in ("image", "video") else {kind}
        return takes_type(candidate, frozenset(wanted))


class _EncodeTimeScorer(BuiltIn[NoParameters], IncrementalScorer):
    takes = NoParameters

    def measure(self, stage: Stage, candidate: Candidate) -> float:
        return candidate.pending_encode_s / candidate.weight

    def scale(self, measures: Sequence[float]) -> float:
        return max(measures)

    def rate(self, measures: Sequence[float], scale: float) -> list[float]:
        return [1 - one / scale if scale > 0 else 1.0 for one in measures]


class _WeightScorer(BuiltIn[NoParameters], IncrementalScorer):
    takes = NoParameters

    def measure(self, stage: Stage, candidate: Candidate) -> float:
        return candidate.weight

    def scale(self, measures: Sequence[float]) -> float:
        return max(measures)

    def rate(self, measures: Sequence[float], scale: float) -> list[float]:
        return [one / scale for one in measures]


# By what an instance has.


class PrefixCache(Parameters):
    """Of ``prefix-cache-scorer`` and its producers.

    The router looks at text, not at tokens, and counts what it has sent, not what engines report.

    Attributes:
        blockSizeTokens: Of one block; of 4 bytes each.
        blockSize: The same, in older files; so is `maxPrefixBlocksToMatch` in blocks.
        lruCapacityPerServer: Blocks that an instance keeps.
    """

    blockSizeTokens: Count | None = None
    blockSize: Count | None = None
    maxPrefixBlocksToMatch: Count | None = None
    maxPrefixTokensToMatch: Count | None = None
    lruCapacityPerServer: Count | None = None
    autoTune: Ignored = None
    prefixMatchInfoProducerName: Ignored = None
    tokenProcessorConfig: Ignored = None
    indexerConfig: Ignored = None
    kvEventsConfig: Ignored = None
    speculativeIndexing: Ignored = None

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


class _PrefixCacheScorer(BuiltIn[PrefixCache]):
    takes = PrefixCache
    wants_blocks = True

    def score(self, request: SelectionRequest, candidates: Candidates) -> Sequence[float]:
        whole = request.up_to(len(request.blocks)) or 1
        return [tokens / whole for tokens in cached_tokens(request, candidates)]


class EmbeddingsCache(Parameters):
    """Of ``mm-embeddings-cache-scorer`` and its producer; an item is taken for 2 MiB."""

    cacheSizeInMBPerServer: Annotated[int, Field(ge=ENTRY_MIB)] | None = None
    cacheSizeInMB: Annotated[int, Field(ge=ENTRY_MIB)] | None = None

    @property
    def items(self) -> int | None:
        """Items that an instance keeps, if it is said."""
        size = self.cacheSizeInMBPerServer or self.cacheSizeInMB
        return size // ENTRY_MIB if size else None


class _EmbeddingsCacheScorer(BuiltIn[EmbeddingsCache]):
    takes = EmbeddingsCache

    def score(self, request: SelectionRequest, candidates: Candidates) -> Sequence[float]:
        wanted = request.items if request.item is None else (request.item,)
        names = [item.item_uuid for item in wanted]
        if not names:
            return [0.0] * len(candidates)
        return [
            sum(name in each.cached.items for name in names) / len(names) for each in candidates
        ]


class _TokenLoad(Parameters):
    queueThresholdTokens: Count = 4 << 20
    nonTextTokenWeight: Ignored = 1.0
    inFlightLoadProducerName: Ignored = None


class _TokenLoadScorer(BuiltIn[_TokenLoad]):
    takes = _TokenLoad
    wants_blocks = True

    def score(self, request: SelectionRequest, candidates: Candidates) -> Sequence[float]:
        own, full = request.tokens, self.p.queueThresholdTokens
        cached = cached_tokens(request, candidates)
        found = [
            1 - (each.tokens + own - known) / each.weight / full
            for each, known in zip(candidates, cached, strict=True)
        ]
        return [max(0.0, score) for score in found] if min(found) < 0 else found


class _NoHitLru(Parameters):
    lruSize: Count = 1024
    prefixPluginType: Ignored = None
    prefixPluginName: Ignored = None
    prefixMatchInfoProducerName: Ignored = None


class NoHitLruScorer(BuiltIn[_NoHitLru]):
    """``no-hit-lru-scorer``: prompts that no candidate has any of go round."""

    takes = _NoHitLru
    wants_blocks = True

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        super().__init__(name, given)
        self._last: Recent[str] = Recent(self.p.lruSize)
        self._is_new = False

    def score(self, request: SelectionRequest, candidates: Candidates) -> Sequence[float]:
        """See `Scorer`."""
        self._is_new = not any(cached_tokens(request, candidates))
        if not self._is_new:
            return [0.5] * len(candidates)
        if len(candidates) == 1:
            return [1.0]
        last = {name: rank for rank, name in enumerate(self._last)}
        ranks = [last.get(each.name, -1) for each in candidates]
        never = [index for index, rank in enumerate(ranks) if rank < 0]
        for place, index in enumerate(never):
            ranks[index] = place - len(never)
        return [max(0.0, 1 - (rank + len(never)) / (len(ranks) - 1)) for rank in ranks]

    def note_picked(self, candidate: Candidate) -> None:
        """Note which candidate gets the request that was scored for last."""
        if self._is_new:
            self._last.use((candidate.name,))


class _ContextLength(Parameters):
    """By a label that names the prompts an instance is for: ``0-2048``, in tokens."""

    label: Annotated[str, Field(min_length=1)] = "llm-d.ai/context-length-range"
    enableFiltering: bool = False
    reusableTokensProducerName: Ignored = None


class _ContextLengthAware(BuiltIn[_ContextLength]):
    takes = _ContextLength
    wants_blocks = True

    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        if not self.p.enableFiltering:
            return candidates
        kept = []
        for each in candidates:
            least, most = _range(each.labels.get(self.p.label))
            if least <= request.tokens <= most:
                kept.append(each)
        return kept

    def score(self, request: SelectionRequest, candidates: Candidates) -> Sequence[float]:
        return [self._score(request.tokens, each.labels.get(self.p.label)) for each in candidates]

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


# By which instance it is.


class _Rings:
    """The ring of the candidates of each stage, kept as long as they are the same."""

    def __init__(self) -> None:
        self._last: dict[Stage, tuple[Candidates, HashRing[Candidate]]] = {}

    def ring(self, stage: Stage, candidates: Candidates) -> HashRing[Candidate]:
        last = self._last.get(stage)
        if last is None or last[0] != candidates:
            last = self._last[stage] = candidates[:], HashRing(candidates)
        return last[1]


class _SessionAffinityScorer(BuiltIn[SessionAffinity]):
    takes = SessionAffinity

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        super().__init__(name, given)
        self._rings = _Rings()

    def score(self, request: SelectionRequest, candidates: Candidates) -> Sequence[float]:
        if not request.session:
            return [0.0] * len(candidates)
        first = next(self._rings.ring(request.stage, candidates).in_order(request.session))
        return [float(each is first) for each in candidates]


class _ConsistentHash(Parameters):
    loadBound: Annotated[float, Field(gt=1, le=1e6, strict=False)] = LOAD_BOUND


class ConsistentHashScorer(BuiltIn[_ConsistentHash]):
    """``consistent-hash-scorer``: 1 for the instance to which a key leads, by the default rule.

    The key is an item's name where one is to be encoded; else the session's, or the request's own.
    """

    takes = _ConsistentHash

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        super().__init__(name, given)
        self._rings = _Rings()

    def score(self, request: SelectionRequest, candidates: Candidates) -> Sequence[float]:
        """See `Scorer`."""
        ring = self._rings.ring(request.stage, candidates)
        load = sum(each.load for each in candidates)
        weight = sum(each.weight for each in candidates)
        chosen = ring.choose(request.affinity, load, weight, bound=self.p.loadBound)
        return [float(each is chosen) for each in candidates]


TYPES: Mapping[str, Factory] = {
    "active-request-scorer": _ActiveRequestScorer,
    "queue-scorer": _QueueScorer,
    "running-requests-size-scorer": _RunningScorer,
    "load-aware-scorer": _LoadAwareScorer,
    "kv-cache-utilization-scorer": _KvCacheScorer,
    "encode-load-scorer": _EncodeLoadScorer,
    "encode-pixels-scorer": _EncodePixelsScorer,
    "encode-time-scorer": _EncodeTimeScorer,
    "token-load-scorer": _TokenLoadScorer,
    "no-hit-lru-scorer": NoHitLruScorer,
    "prefix-cache-scorer": _PrefixCacheScorer,
    "precise-prefix-cache-scorer": _PrefixCacheScorer,
    "mm-embeddings-cache-scorer": _EmbeddingsCacheScorer,
    "session-affinity-scorer": _SessionAffinityScorer,
    "consistent-hash-scorer": ConsistentHashScorer,
    "weight-scorer": _WeightScorer,
    "context-length-aware": _ContextLengthAware,
}
