"""Built-in scorers, 0 to 1 for each candidate, 1 for the best, and pickers; see docs/choice.md."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from epd_portable.placement.instances import LOAD_BOUND, Instance
from epd_portable.placement.profiles.filters import (
    Count,
    CountOrZero,
    OnRing,
    Parameters,
    Part,
    SessionAffinity,
    takes_type,
)
from epd_portable.placement.profiles.selection_types import Candidates, SelectionRequest

ENTRY_MIB = 2
"""Size of an item's output in llm-d's measure of a cache."""

Scores = Sequence[float]


# By load.


def _loads(candidates: Candidates) -> list[float]:
    return [each.load / each.weight for each in candidates]


def _reported(candidates: Candidates, what: str) -> list[float]:
    """Return what candidates report; if one does not, of all what the front itself counts."""
    found = []
    for each in candidates:
        value = getattr(each.reported, what, None)
        if value is None:
            return _loads(candidates)
        found.append(value / each.weight)
    return found


class _ActiveRequestScorer(Parameters):
    """Up to `idleThreshold` requests are idle; the best of the others gets `maxBusyScore`."""

    idleThreshold: CountOrZero = 0
    maxBusyScore: Part = 1.0

    def score(self, request: SelectionRequest, candidates: Candidates) -> Scores:
        loads = _loads(candidates)
        most, idle, best = max(loads), self.idleThreshold, self.maxBusyScore
        return [1.0 if one <= idle else best * (most - one) / most for one in loads]


class _ByReports(Parameters):
    """1 for the least of what candidates report, 0 for the most."""

    wants_loads: ClassVar[bool] = True
    what: ClassVar[str] = "waiting"

    def loads(self, request: SelectionRequest, candidates: Candidates) -> list[float]:
        # Queues of encode instances are such of items.
        return _reported(candidates, "items" if request.stage == "encode" else self.what)

    def score(self, request: SelectionRequest, candidates: Candidates) -> Scores:
        loads = self.loads(request, candidates)
        most = max(loads)
        span = most - min(loads)
        return [(most - one) / span if span else 1.0 for one in loads]


class _RunningScorer(_ByReports):
    what = "running"


class _LoadAwareScorer(_ByReports):
    threshold: Count = 128

    def score(self, request: SelectionRequest, candidates: Candidates) -> Scores:
        loads = self.loads(request, candidates)
        return [0.5 * (1 - min(one / self.threshold, 1.0)) for one in loads]


class _KvCacheScorer(Parameters):
    wants_loads: ClassVar[bool] = True

    def score(self, request: SelectionRequest, candidates: Candidates) -> Scores:
        used = [each.reported.kv_used if each.reported else None for each in candidates]
        free = [1 - one for one in used if one is not None]
        unknown = sum(free) / len(free) if free else 0.0
        return [unknown if one is None else 1 - one for one in used]


class _EncodeLoadScorer(Parameters):
    wants_loads: ClassVar[bool] = True

    threshold: Count = 10
    encoderType: Literal["vision", "image", "video", "audio"] | None = None

    def score(self, request: SelectionRequest, candidates: Candidates) -> Scores:
        loads = _reported(candidates, "items")
        scores = [max(0.0, 1 - load / self.threshold) for load in loads]
        kind, item = self.encoderType, request.item
        if kind is None:
            return scores
        modalities = {"image", "video"} if kind == "vision" else {kind}
        if item is not None and item.modality not in modalities:
            return [0.0] * len(candidates)
        types = frozenset({kind, "vision"} if kind in ("image", "video") else {kind})
        pairs = zip(candidates, scores, strict=True)
        return [score if takes_type(each, types) else 0.0 for each, score in pairs]


class _EncodeTimeScorer(Parameters):
    def score(self, request: SelectionRequest, candidates: Candidates) -> Scores:
        times = [each.pending_encode_s / each.weight for each in candidates]
        most = max(times)
        return [1 - one / most if most > 0 else 1.0 for one in times]


class _WeightScorer(Parameters):
    def score(self, request: SelectionRequest, candidates: Candidates) -> Scores:
        most = max(each.weight for each in candidates)
        return [each.weight / most for each in candidates]


# By what an instance has.


class PrefixCache(Parameters):
    """``prefix-cache-scorer``, and its producers, whose parameters have the same effect.

    The front looks at text, not at tokens, and counts what it has sent, not what engines report.

    Attributes:
        blockSizeTokens: Of one block; of 4 bytes each.
        blockSize: The same, in older files; so is `maxPrefixBlocksToMatch` in blocks.
        lruCapacityPerServer: Blocks that an instance keeps.
    """

    wants_blocks: ClassVar[bool] = True

    blockSizeTokens: Count | None = None
    blockSize: Count | None = None
    maxPrefixBlocksToMatch: Count | None = None
    maxPrefixTokensToMatch: Count | None = None
    lruCapacityPerServer: Count | None = None

    @property
    def block_tokens(self) -> int | None:
        """Tokens of one block, if it is set."""
        return self.blockSizeTokens or self.blockSize

    def most_blocks(self, block_tokens: int) -> int | None:
        """Return how many blocks are looked at, if it is set."""
        if self.maxPrefixBlocksToMatch is not None:
            return self.maxPrefixBlocksToMatch
        if self.maxPrefixTokensToMatch is not None:
            return max(1, self.maxPrefixTokensToMatch // block_tokens)
        return None

    def score(self, request: SelectionRequest, candidates: Candidates) -> Scores:
        whole = request.prompt.up_to(len(request.blocks)) or 1
        return [tokens / whole for tokens in request.cached_tokens(candidates)]


class EmbeddingsCache(Parameters):
    """``mm-embeddings-cache-scorer``, and its producer; an item is taken for 2 MiB."""

    cacheSizeInMBPerServer: Annotated[int, Field(ge=ENTRY_MIB)] | None = None
    cacheSizeInMB: Annotated[int, Field(ge=ENTRY_MIB)] | None = None

    @property
    def items(self) -> int | None:
        """Items that an instance keeps, if it is set."""
        size = self.cacheSizeInMBPerServer or self.cacheSizeInMB
        return size // ENTRY_MIB if size else None

    def score(self, request: SelectionRequest, candidates: Candidates) -> Scores:
        items = request.items if request.item is None else (request.item,)
        names = [item.item_uuid for item in items]
        most = len(names) or 1
        caches, found = [each.cached.items for each in candidates], [0] * len(candidates)
        for name in names:
            found = [count + (name in cache) for count, cache in zip(found, caches, strict=True)]
        return [count / most for count in found]


class _TokenLoadScorer(Parameters):
    wants_blocks: ClassVar[bool] = True

    queueThresholdTokens: Count = 4 << 20

    def score(self, request: SelectionRequest, candidates: Candidates) -> Scores:
        own, full = request.prompt.tokens, self.queueThresholdTokens
        pairs = zip(candidates, request.cached_tokens(candidates), strict=True)
        return [
            max(0.0, 1 - (each.tokens + own - known) / each.weight / full) for each, known in pairs
        ]


# By a hash.


class _SessionAffinityScorer(SessionAffinity):
    def score(self, request: SelectionRequest, candidates: Candidates) -> Scores:
        own = self.own(request, candidates)
        return [float(each is own) for each in candidates]


class ConsistentHashScorer(OnRing):
    """``consistent-hash-scorer``: 1 for the instance to which a key leads, by the default rule.

    The key is an item's name where one is to be encoded; else the session's, or the request's own.
    """

    loadBound: Annotated[float, Field(gt=1, le=1e6, strict=False)] = LOAD_BOUND

    def score(self, request: SelectionRequest, candidates: Candidates) -> Scores:
        ring = self.ring(request.stage, candidates)
        chosen = ring.choose(request.affinity, candidates, self.loadBound)
        return [float(each is chosen) for each in candidates]


TYPES: Mapping[str, type[Parameters]] = {
    "active-request-scorer": _ActiveRequestScorer,
    "queue-scorer": _ByReports,
    "running-requests-size-scorer": _RunningScorer,
    "load-aware-scorer": _LoadAwareScorer,
    "kv-cache-utilization-scorer": _KvCacheScorer,
    "encode-load-scorer": _EncodeLoadScorer,
    "encode-time-scorer": _EncodeTimeScorer,
    "token-load-scorer": _TokenLoadScorer,
    "prefix-cache-scorer": PrefixCache,
    "precise-prefix-cache-scorer": PrefixCache,
    "mm-embeddings-cache-scorer": EmbeddingsCache,
    "session-affinity-scorer": _SessionAffinityScorer,
    "consistent-hash-scorer": ConsistentHashScorer,
    "weight-scorer": _WeightScorer,
}


# Pickers.


class MaxScorePicker(Parameters):
    """The best one; of equals, any."""

    def pick(
        self, request: SelectionRequest, candidates: Candidates, scores: Sequence[float]
    ) -> Instance:
        best = max(scores)
        equal = [each for each, score in zip(candidates, scores, strict=True) if score == best]
        return equal[int(request.chance() * len(equal))]


class _WeightedRandomPicker(Parameters):
    def pick(
        self, request: SelectionRequest, candidates: Candidates, scores: Sequence[float]
    ) -> Instance:
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
    ) -> Instance:
        return super().pick(request, candidates, [1.0] * len(scores))


PICKERS: Mapping[str, type[Parameters]] = {
    "max-score-picker": MaxScorePicker,
    "weighted-random-picker": _WeightedRandomPicker,
    "random-picker": _RandomPicker,
}
