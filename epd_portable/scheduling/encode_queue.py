"""Which encode requests start in a step: whole, and fairly among the consumers of their items.

A request starts when *all* its items fit together into what one step may compute and into the
encoder cache; until then it waits. Items that are in the cache already need room there but are not
computed.

An item's room is kept until its consumer, a PD instance, has it; one that is slow, or whose client
left, keeps it for long. So room is shared among consumers, and this always holds:

- Requests for one consumer start in the order of their arrival.
- A consumer's *share* is the cache divided by the consumers that have requests here or had some
  within the time that a transfer may take. A request is *entitled* to start if its consumer keeps
  no more than its share with it, or nothing at all without it.
- Beyond its share a consumer takes only what nobody who is entitled waits for, and it leaves room
  for another request like the last one of every consumer that has none waiting. Alone it takes
  everything.
- Nobody waits behind a request that is not entitled. The first that is entitled and does not fit
  gets its room: whoever starts meanwhile stays, with its consumer, in an equal part of what it and
  those beyond their shares leave. So everybody starts, provided that transfers end.

A request that no empty instance could hold whole would wait for ever. It starts when it is the
first and nothing else is under way; the engine then encodes as many of its items a step as fit,
and nobody starts before all of them are encoded. What has been encoded makes room as soon as it is
transferred. Only a single item beyond a limit is hopeless.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from epd_portable.scheduling.encoder_cache import EncoderCacheManager, MultiModalRequest

logger = logging.getLogger(__name__)


class EncodeRequest(MultiModalRequest, Protocol):
    """What the queue reads of vLLM's ``Request`` beyond its items."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, places of items included."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that steps have been scheduled for."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    """What one step of the engine may do.

    Attributes:
        embeddings: Encoder embeddings that it may compute.
        tokens: Prompt tokens that it may pass.
    """

    embeddings: int
    tokens: int


_NOBODY = frozenset({""})
"""Stands for the consumers of requests that have none."""

Outcome = Literal["starts", "full", "short", "beyond"]
"""Of an attempt: it starts; the step computes no more; the cache has no room; or that would be for
others."""


class KeptRoom:
    """How much of the encoder cache transfers keep for each consumer, in embeddings.

    An item that is on its way to two consumers counts for both, and once for each.
    """

    def __init__(self) -> None:
        self._items: dict[str, tuple[str, str]] = {}
        self._transfers: Counter[tuple[str, str]] = Counter()
        self._embeds: Counter[str] = Counter()
        self._sizes: dict[tuple[str, str], int] = {}

    def keep(self, transfer_id: str, consumer: str, mm_hash: str, num_embeds: int) -> None:
        """A transfer keeps its item's room from now on."""
        item = self._items[transfer_id] = (consumer, mm_hash)
        self._transfers[item] += 1
        if item not in self._sizes:
            self._sizes[item] = num_embeds
            self._embeds[consumer] += num_embeds

    def give_back(self, transfer_id: str) -> None:
        """A transfer that `keep` was told of has ended."""
        item = self._items.pop(transfer_id)
        self._transfers[item] -= 1
        if not self._transfers[item]:
            del self._transfers[item]
            consumer, _ = item
            self._embeds[consumer] -= self._sizes.pop(item)
            if not self._embeds[consumer]:
                del self._embeds[consumer]

    def by_consumer(self) -> Counter[str]:
        """Return the room of each consumer that has any."""
        return self._embeds.copy()


@dataclass(frozen=True, slots=True)
class _Arrival:
    request: EncodeRequest
    consumers: frozenset[str]


@dataclass(slots=True)
class _Step:
    """What has been given away of a step that is about to be scheduled."""

    tokens: int
    embeddings: int
    kept: Counter[str]
    share: int
    taken: int = 0
    short: bool = False
    """Somebody who is entitled waits for room."""


class EncodeQueue:
    """Requests of an encode instance between their arrival and the end of their encoding.

    Args:
        cache: The scheduler's encoder cache.
        limits: Of each step.
        kept: Told of every transfer by whoever orders them.
        remember_s: How long a consumer counts that has no requests here.
    """

    def __init__(
        self, cache: EncoderCacheManager, limits: StepLimits, kept: KeptRoom, remember_s: float
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._kept = kept
        self._remember_s = remember_s
        self._waiting: dict[str, _Arrival] = {}
        self._started: dict[str, EncodeRequest] = {}
        self._admitted: dict[str, EncodeRequest] = {}
        self._counted: set[str] = set()
        self._hopeless: set[str] = set()
        self._seen: dict[str, tuple[float, int]] = {}

    def arrived(self, request: EncodeRequest, consumers: Iterable[str], now: float) -> None:
        """Queue a request that has items.

        Args:
            request: Of the engine.
            consumers: Whom its items are for.
            now: Seconds.
        """
        sizes = self._sizes(request)
        largest = max(sizes.values())
        limit = min(self._limits.embeddings, self._cache.cache_size)
        if largest > limit:
            logger.error(
                "request %s fails: one of its items has %d embeddings, and a step of this encode "
                "instance computes %d and its encoder cache holds %d; raise max_num_batched_tokens "
                "in engine_args, or send a smaller item",
                request.request_id,
                largest,
                self._limits.embeddings,
                self._cache.cache_size,
            )
            self._hopeless.add(request.request_id)
        arrival = _Arrival(request, frozenset(consumers) or _NOBODY)
        self._waiting[request.request_id] = arrival
        for consumer in arrival.consumers:
            self._seen[consumer] = (now, sum(sizes.values()))

    def withdraw(self, request_id: str) -> None:
        """The request has finished, or was aborted."""
        self._waiting.pop(request_id, None)
        for requests in (self._started, self._admitted):
            requests.pop(request_id, None)
        self._hopeless.discard(request_id)

    def admit(self, now: float) -> None:
        """Choose who starts in the step that is about to be scheduled.

        Admitted requests hold their items that are in the cache, so that making room for the items
        of one evicts none of another.

        Args:
            now: Seconds.
        """
        self._started = {
            request_id: request
            for request_id, request in self._started.items()
            if request.num_computed_tokens < request.num_prompt_tokens
        }
        if self._started:
            return
        self._counted.clear()
        waiting = [
            arrival
            for request_id, arrival in self._waiting.items()
            if request_id not in self._hopeless
        ]
        wanting = {consumer for arrival in waiting for consumer in arrival.consumers}
        self._seen = {
            consumer: (last_s, embeds)
            for consumer, (last_s, embeds) in self._seen.items()
            if consumer in wanting or now - last_s < self._remember_s
        }
        size = self._cache.cache_size
        sharing = max(1, len(self._seen))
        step = _Step(
            tokens=self._limits.tokens,
            embeddings=self._limits.embeddings,
            kept=self._kept.by_consumer(),
            share=size // sharing,
        )
        left = self._admit_entitled(waiting, step, sharing)
        if not step.short:
            spare = sum(
                max(0, min(embeds, step.share) - step.kept[consumer])
                for consumer, (_, embeds) in self._seen.items()
                if consumer not in wanting
            )
            for arrival in left:
                if self._try(arrival, step, spare=spare) != "starts":
                    break

    @property
    def is_empty(self) -> bool:
        """Whether no request waits or is encoded in parts."""
        return not self._waiting and not self._started

    def may_start(self, request_id: str) -> bool:
        """Tell whether the engine may schedule a request in this step."""
        return request_id not in self._waiting or request_id in self._admitted

    def scheduled(self, request_ids: Container[str]) -> None:
        """The step has been scheduled; the engine may have left out some that were admitted."""
        for request_id, request in self._admitted.items():
            if request_id not in request_ids:
                self._cache.free(request)
                continue
            del self._waiting[request_id]
            self._started[request_id] = request
            if request.num_computed_tokens < request.num_prompt_tokens:
                self._tell_parts(request)
        self._admitted.clear()

    def take_hopeless(self) -> set[str]:
        """Return requests that can never be encoded, for the engine to fail; each once."""
        hopeless, self._hopeless = self._hopeless, set()
        for request_id in hopeless:
            self._waiting.pop(request_id, None)
        return hopeless

    def _admit_entitled(self, waiting: list[_Arrival], step: _Step, sharing: int) -> list[_Arrival]:
        """Admit who is entitled, in order; return who is not, or nobody if the step is full."""
        left: list[_Arrival] = []
        held: set[str] = set()
        for arrival in waiting:
            outcome = "beyond" if held & arrival.consumers else self._try(arrival, step)
            if outcome == "starts":
                continue
            if outcome == "full":
                return []
            held |= arrival.consumers
            left.append(arrival)
            if outcome == "short" and not step.short:
                step.short = True
                step.share = self._share_beside(arrival, step, sharing)
        return left

    def _share_beside(self, first: _Arrival, step: _Step, sharing: int) -> int:
        """Return what others may keep while the first who is entitled waits for room.

        Who keeps more than a share starts nothing meanwhile, so the others share what that leaves.
        """
        beyond = {consumer: kept for consumer, kept in step.kept.items() if kept > step.share}
        size = self._cache.cache_size - sum(beyond.values())
        sharing = max(1, sharing - len(beyond.keys() - first.consumers))
        needed = sum(self._sizes(first.request).values())
        if needed > size:  # It waits for them in any case.
            return max(0, size) // sharing
        return (size - max(needed, size // sharing)) // max(1, sharing - 1)

    def _try(self, arrival: _Arrival, step: _Step, spare: int | None = None) -> Outcome:
        """Admit a request if it may start.

        Args:
            arrival: The request.
            step: What has been given away.
            spare: Room to leave; ``None`` if the request must be entitled.
        """
        request = arrival.request
        before = self._cache.num_freeable_slots
        sizes = self._sizes(request)
        missing = sizes.keys() - self._hold_cached(request) - self._counted
        wanted = sum(sizes[mm_hash] for mm_hash in missing)
        # Where room is short, what is kept for somebody else must not be kept for longer.
        idle = before - self._cache.num_freeable_slots
        room = sum(sizes.values()) if step.short else idle + wanted
        outcome = self._outcome(arrival, step, wanted=wanted, room=room, spare=spare)
        if outcome != "starts":
            self._cache.free(request)
            return outcome
        self._admitted[request.request_id] = request
        self._counted |= missing
        step.tokens -= request.num_prompt_tokens
        step.embeddings -= wanted
        step.taken += wanted
        for consumer in arrival.consumers:
            step.kept[consumer] += room
        return "starts"

    def _outcome(
        self, arrival: _Arrival, step: _Step, *, wanted: int, room: int, spare: int | None
    ) -> Outcome:
        kept = [step.kept[consumer] for consumer in arrival.consumers]
        entitled = max(kept) + room <= step.share or (not any(kept) and not step.short)
        if spare is None and not entitled:
            return "beyond"
        request = arrival.request
        step_holds_it = request.num_prompt_tokens <= step.tokens and wanted <= step.embeddings
        room_left = self._cache.num_freeable_slots - step.taken - (spare or 0)
        if step_holds_it and wanted <= room_left:
            return "starts"
        if self._never_whole(request) and not self._admitted and not step.short:
            return "starts"
        return "short" if step_holds_it else "full"

    def _sizes(self, request: EncodeRequest) -> dict[str, int]:
        """Return the embeddings of each distinct item."""
        return {
            feature.identifier: request.get_num_encoder_embeds(index)
            for index, feature in enumerate(request.mm_features)
        }

    def _never_whole(self, request: EncodeRequest) -> bool:
        together = sum(self._sizes(request).values())
        return (
            together > min(self._limits.embeddings, self._cache.cache_size)
            or request.num_prompt_tokens > self._limits.tokens
        )

    def _hold_cached(self, request: EncodeRequest) -> set[str]:
        return {
            feature.identifier
            for index, feature in enumerate(request.mm_features)
            if self._cache.hold_entry(request, index)
        }

    def _tell_parts(self, request: EncodeRequest) -> None:
        logger.warning(
            "request %s is encoded in parts: its %d items have %d embeddings in a prompt of %d "
            "tokens, and a step of this encode instance computes %d embeddings and %d tokens, and "
            "its encoder cache holds %d; raise max_num_batched_tokens in engine_args, or send "
            "fewer items in one encode request",
            request.request_id,
            len(request.mm_features),
            sum(self._sizes(request).values()),
            request.num_prompt_tokens,
            self._limits.embeddings,
            self._limits.tokens,
            self._cache.cache_size,
        )
