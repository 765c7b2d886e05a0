"""Which encode requests start in a step: whole, and in the order of their arrival.

A request starts when *all* its items fit together into what one step may compute and into the
encoder cache; until then it waits, and so does everybody behind it. Items that are in the cache
already need room there but are not computed.

A request that no empty instance could hold whole would wait for ever. It starts when it is the
first and nothing else is under way; the engine then encodes as many of its items a step as fit,
and nobody starts before all of them are encoded. What has been encoded makes room as soon as it is
transferred. Only a single item beyond a limit is hopeless.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import dataclass
from typing import Protocol

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


class EncodeQueue:
    """Requests of an encode instance between their arrival and the end of their encoding.

    Args:
        cache: The scheduler's encoder cache.
        limits: Of each step.
    """

    def __init__(self, cache: EncoderCacheManager, limits: StepLimits) -> None:
        self._cache = cache
        self._limits = limits
        self._waiting: dict[str, EncodeRequest] = {}
        self._started: dict[str, EncodeRequest] = {}
        self._admitted: dict[str, EncodeRequest] = {}
        self._hopeless: set[str] = set()

    def arrived(self, request: EncodeRequest) -> None:
        """Queue a request that has items."""
        largest = max(request.get_num_encoder_embeds(i) for i in range(len(request.mm_features)))
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
        self._waiting[request.request_id] = request

    def withdraw(self, request_id: str) -> None:
        """The request has finished, or was aborted."""
        for requests in (self._waiting, self._started, self._admitted):
            requests.pop(request_id, None)
        self._hopeless.discard(request_id)

    def admit(self) -> None:
        """Choose who starts in the step that is about to be scheduled.

        Admitted requests hold their items that are in the cache, so that making room for the items
        of one evicts none of another.
        """
        self._started = {
            request_id: request
            for request_id, request in self._started.items()
            if request.num_computed_tokens < request.num_prompt_tokens
        }
        if self._started:
            return
        tokens, embeddings = self._limits.tokens, self._limits.embeddings
        counted: set[str] = set()
        for request_id, request in self._waiting.items():
            if request_id in self._hopeless:
                continue
            held = self._hold_cached(request)
            sizes = self._sizes(request)
            missing = sizes.keys() - held - counted
            wanted = sum(sizes[mm_hash] for mm_hash in missing)
            taken = self._limits.embeddings - embeddings
            if (
                request.num_prompt_tokens > tokens
                or wanted > embeddings
                or wanted + taken > self._cache.num_freeable_slots
            ):
                self._cache.free(request)
                if self._never_whole(request) and not self._admitted:
                    self._admitted[request_id] = request
                return
            tokens -= request.num_prompt_tokens
            embeddings -= wanted
            counted |= missing
            self._admitted[request_id] = request

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
            if self._cache.check_and_update_cache(request, index)
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
