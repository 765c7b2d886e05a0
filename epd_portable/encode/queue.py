"""Admission of encode requests to a step: whole, and fair among the consumers of their items.

A request starts when *all* its items fit together into what one step may compute and into the
encoder cache; until then it waits. Items that are in the cache already need space but are not
computed. Outputs leave when all of a step are computed, so a step does not start more requests than
make the encoder fast. The prompt of a single large item may take several steps.

An item's space is reserved until its consumer, a PD instance, has it. A consumer that is slow or
dead, or whose client left, holds it for long. So space is shared among consumers, and this always
holds:

- Requests for one consumer start in the order of their arrival.
- A consumer's *share* is the cache divided by the consumers that have requests here or had some
  within the time that a transfer may take. A request is *entitled* to start if its consumer keeps
  no more than its share with it, nothing at all without it, or all of its items already. So a
  consumer that requests no more than its share never waits for what another does not take. Alone a
  consumer takes everything.
- No request waits behind one that is not entitled. The first that is entitled and does not fit gets
  its space: those that start meanwhile stay, with their consumers, in an equal part of what it and
  those beyond their shares leave. That happens where an item is larger than a share, or when the
  shares have become smaller because another consumer came. So every request starts, provided that
  transfers end.

A consumer may keep its own space for an item that waits here, and take nothing until that comes.
So requests of a consumer that has taken nothing for long preempt outputs, the youngest first: the
front has these encoded again, and every request that waits comes to its turn.

A request that no empty instance could encode would wait for ever: it fails.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Set
from dataclasses import dataclass, field
from typing import Literal, Protocol

from epd_portable.encode.dispatcher import Dispatcher
from epd_portable.encode.two_levels import TwoLevelCache
from epd_portable.items.table import MultiModalRequest

logger = logging.getLogger(__name__)


class EncodeRequest(MultiModalRequest, Protocol):
    """Fields that the queue reads of vLLM's ``Request`` beyond its items' names and sizes.

    Attributes:
        num_prompt_tokens: Places of items included.
        num_computed_tokens: Tokens that steps have been scheduled for.
    """

    @property
    def num_prompt_tokens(self) -> int: ...  # noqa: D102 - above
    @property
    def num_computed_tokens(self) -> int: ...  # noqa: D102 - above


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    """Bounds of one step of the engine.

    Attributes:
        embeddings: Encoder embeddings that it may compute.
        together: Of them beyond which no request starts next to others: outputs leave when all of
            their step are computed.
        tokens: Prompt tokens that it may pass.
    """

    embeddings: int
    together: int
    tokens: int


Outcome = Literal["starts", "full", "short", "not entitled"]
"""Result of an attempt: it starts; the step computes no more; the cache has no space; or the
consumer has its share."""


@dataclass(slots=True, eq=False)
class _Arrival:
    """A request from its arrival until all of it is encoded.

    Attributes:
        consumer: Whom its items are for.
        sizes: Embeddings of each distinct item.
    """

    request: EncodeRequest
    consumer: str
    sizes: dict[str, int]
    total: int


@dataclass(slots=True)
class _Step:
    """Remainder of a step that is about to be scheduled.

    Attributes:
        together: Of what is computed together; below 0 when one request exceeds it.
        charged: Consumers with the items that are kept for them, or start in this step.
        kept: Embeddings of these, by consumer.
        share: What each may keep.
        short: An entitled request waits for space.
        counted: Items that are encoded in this step.
    """

    tokens: int
    embeddings: int
    together: int
    room: int
    charged: set[tuple[str, str]]
    kept: Counter[str]
    share: int
    short: bool = False
    counted: set[str] = field(default_factory=set)


class EncodeQueue:
    """Requests of an encode instance between their arrival and the end of their encoding.

    Args:
        limits: Of each step.
        dispatcher: Knows the transfers that keep space, and of which requests.
        remember_s: How long a consumer counts that has no requests here.
        preempt_after_s: How long a consumer takes nothing, and its requests wait for space, before
            they preempt outputs.
    """

    def __init__(
        self,
        cache: TwoLevelCache,
        limits: StepLimits,
        dispatcher: Dispatcher,
        remember_s: float,
        preempt_after_s: float,
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._dispatcher = dispatcher
        self._remember_s = remember_s
        self._preempt_after_s = preempt_after_s
        self._seen: dict[str, float] = {}
        """Last time at which a consumer had a request that waited."""
        self._waiting: dict[str, _Arrival] = {}
        """Requests in the order of their arrival."""
        self._admitted: set[str] = set()
        """Waiting requests that may start in this step."""
        self._started: dict[str, _Arrival] = {}
        """Requests whose prompts take more steps."""
        self._too_large: set[str] = set()
        self._stalled: dict[str, float] = {}
        """Consumers that take nothing and whose requests wait for space, and since when."""
        self._to_preempt: Counter[str] = Counter()

    def arrived(self, request: EncodeRequest, consumer: str, now: float) -> None:
        """Queue a request that has items, for one consumer; empty for none."""
        sizes = {
            feature.identifier: request.get_num_encoder_embeds(index)
            for index, feature in enumerate(request.mm_features)
        }
        self._seen[consumer] = now
        total = sum(sizes.values())
        limits, cache_size = self._limits, self._cache.cache_size
        too_long = request.num_prompt_tokens > limits.tokens and len(sizes) > 1
        if total > min(limits.embeddings, cache_size) or too_long:
            logger.error(
                "request %s fails: its %d items have %d embeddings in a prompt of %d tokens; a "
                "step of this encode instance computes %d embeddings and %d tokens, and its "
                "encoder cache holds %d; send one item in each encode request, a smaller item, or "
                "raise max_num_batched_tokens in engine_args",
                request.request_id,
                len(sizes),
                total,
                request.num_prompt_tokens,
                limits.embeddings,
                limits.tokens,
                cache_size,
            )
            self._too_large.add(request.request_id)
        else:
            self._waiting[request.request_id] = _Arrival(request, consumer, sizes, total)

    def withdraw(self, request_id: str) -> None:
        """End a request that has finished or was aborted."""
        self._too_large.discard(request_id)
        self._admitted.discard(request_id)
        self._waiting.pop(request_id, None)
        self._started.pop(request_id, None)

    def delivered(self, consumers: Set[str]) -> None:
        """Note that transfers to consumers have ended, and were not preempted."""
        for consumer in consumers:
            self._stalled.pop(consumer, None)

    def admit(self, now: float) -> None:
        """Choose the requests that start in the step that is about to be scheduled.

        Admitted requests hold their items that are in the cache, so that making space for the items
        of one evicts none of another.
        """
        if not self._waiting:
            return
        self._seen.update((each.consumer, now) for each in self._waiting.values())
        for consumer in [key for key, at_s in self._seen.items() if now - at_s >= self._remember_s]:
            del self._seen[consumer]
        step = self._next_step()
        behind: set[str] = set()
        """Consumers whose next request does not start."""
        for arrival in self._waiting.values():
            repeats = self._dispatcher.repeats
            if arrival.consumer in behind or repeats(arrival.request.request_id):
                continue
            outcome = self._try(arrival, step)
            if outcome == "full":
                return
            if outcome != "starts":
                behind.add(arrival.consumer)
                self._preempt(arrival, outcome, step, now)
            if outcome == "short" and not step.short:
                step.short = True
                step.share = self._share_beside(arrival, step)
        self._stalled = {key: self._stalled[key] for key in behind}

    def take_to_preempt(self) -> Counter[str]:
        """Return the embeddings of outputs to preempt, by their consumer; each once."""
        to_preempt, self._to_preempt = self._to_preempt, Counter()
        return to_preempt

    @property
    def is_empty(self) -> bool:
        """Return whether no request waits or takes more steps."""
        return not (self._waiting or self._started)

    def may_start(self, request_id: str) -> bool:
        """Return whether the engine may schedule a request in this step."""
        waits = request_id in self._waiting or request_id in self._too_large
        return not waits or request_id in self._admitted

    def scheduled(self, request_ids: Container[str]) -> None:
        """Note the scheduled requests; the engine may have omitted some that were admitted."""
        for request_id in self._admitted:
            if request_id in request_ids:
                self._started[request_id] = self._waiting.pop(request_id)
            else:
                self._cache.free(self._waiting[request_id].request)
        self._admitted.clear()
        for request_id, arrival in list(self._started.items()):
            if arrival.request.num_computed_tokens >= arrival.request.num_prompt_tokens:
                del self._started[request_id]

    def take_too_large(self) -> set[str]:
        """Return requests that can never be encoded, for the engine to fail; each once."""
        too_large, self._too_large = self._too_large, set()
        return too_large

    # -- what starts -----------------------------------------------------------------------------

    def _next_step(self) -> _Step:
        """Return what a step has next to the requests that have started before it."""
        kept = self._dispatcher.kept()
        step = _Step(
            tokens=self._limits.tokens,
            embeddings=self._limits.embeddings,
            together=self._limits.together,
            room=self._cache.num_freeable_slots,
            charged={(consumer, item.mm_hash) for consumer, item in kept},
            kept=Counter(),
            share=self._cache.cache_size // len(self._seen),
        )
        for consumer, item in kept:
            step.kept[consumer] += item.num_embeds
        for request_id, arrival in self._started.items():
            request = arrival.request
            step.tokens -= request.num_prompt_tokens - request.num_computed_tokens
            for mm_hash, size in arrival.sizes.items():
                if request_id not in self._cache.holders(mm_hash):
                    step.embeddings -= size
                    step.together -= size
                    step.room -= size
        return step

    def _share_beside(self, first: _Arrival, step: _Step) -> int:
        """Return what others may keep while the first entitled request waits for space.

        Consumers beyond a share start nothing meanwhile, so the others share what those leave.
        """
        beyond = {consumer: kept for consumer, kept in step.kept.items() if kept > step.share}
        size = self._cache.cache_size - sum(beyond.values())
        sharing = max(1, len(self._seen) - len(beyond.keys() - {first.consumer}))
        if first.total > size:  # It waits for them in any case.
            return max(0, size) // sharing
        return (size - max(first.total, size // sharing)) // max(1, sharing - 1)

    def _try(self, arrival: _Arrival, step: _Step) -> Outcome:
        """Admit a request if it is entitled to start and fits."""
        request, consumer = arrival.request, arrival.consumer
        kept, more = step.kept[consumer], self._more(arrival, step)
        if more and kept + more > step.share and (kept or step.short):
            return "not entitled"
        tokens = min(request.num_prompt_tokens, self._limits.tokens)
        most = step.embeddings
        if self._admitted or step.together < self._limits.together:
            most = min(most, step.together)
        wanted = idle = 0
        for mm_hash, size in arrival.sizes.items():
            item = self._cache.items.get(mm_hash)
            if item is None or not item.is_here:
                wanted += 0 if mm_hash in step.counted else size
            elif not item.holders:
                idle += size
        if tokens > step.tokens or wanted > max(0, most):
            return "full"
        if idle + wanted > step.room:
            return "short"
        for index, feature in enumerate(request.mm_features):
            if not self._cache.hold_entry(request, index):
                step.counted.add(feature.identifier)
        self._admitted.add(request.request_id)
        step.tokens -= tokens
        step.embeddings -= wanted
        step.together -= wanted
        step.room -= idle + wanted
        step.kept[consumer] += more
        step.charged.update((consumer, mm_hash) for mm_hash in arrival.sizes)
        return "starts"

    def _preempt(self, first: _Arrival, outcome: Outcome, step: _Step, now: float) -> None:
        """Preempt outputs for the next request of a consumer that has taken nothing for long.

        A consumer beyond its share waits for its own outputs, others for those of who keeps most.
        """
        consumer = first.consumer
        if now - self._stalled.setdefault(consumer, now) >= self._preempt_after_s:
            most = max(step.kept, key=step.kept.__getitem__, default=consumer)
            self._to_preempt[most if outcome == "short" else consumer] += first.total

    def _more(self, arrival: _Arrival, step: _Step) -> int:
        """Return how much more the consumer of a request keeps if that starts."""
        if step.short:  # What is kept already must not be kept for longer.
            return arrival.total
        return sum(
            size
            for mm_hash, size in arrival.sizes.items()
            if (arrival.consumer, mm_hash) not in step.charged
        )
