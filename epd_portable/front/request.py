"""A request at the front, its items, and the errors that clients get when it cannot be served."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, ClassVar

from vllm.v1.engine import EngineCoreRequest

from epd_portable.placement.fallbacks import JOB_GRACE_S
from epd_portable.placement.instances import Instance
from epd_portable.vllm_plugin import compat
from epd_portable.vllm_plugin.video_parts import is_part

GracefulHTTPError: Any = compat.graceful_error()
BLOCK_TOKENS = 64


class UnavailableError(GracefulHTTPError):
    """No engine can serve a request at the moment: 503."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}: try again in a few seconds", HTTPStatus.SERVICE_UNAVAILABLE)


class FullError(GracefulHTTPError):
    """Encode engines have as many items as they take, and no other engine encodes: 429."""

    def __init__(self) -> None:
        message = "every encode engine has max_queued_items items: try again in a few seconds"
        super().__init__(message, HTTPStatus.TOO_MANY_REQUESTS)


@dataclass(frozen=True, slots=True)
class FrontItem:
    """One item of a request, as decisions see it; `feature` is vLLM's."""

    feature: Any

    @property
    def item_uuid(self) -> str:
        """The engines' identifier, a digest of its content."""
        return str(self.feature.identifier)

    @property
    def modality(self) -> Any:
        """What it is to the model."""
        return self.feature.modality

    @property
    def pixels(self) -> int:
        """Its size, in tokens: only compared."""
        return int(self.feature.mm_position.length)

    @property
    def is_part(self) -> bool:
        """Whether it is a part of a video."""
        return self.modality == "video" and is_part(self.item_uuid)


@dataclass(frozen=True, slots=True)
class PrefilledKv:
    """KV of a prompt that a prefill engine has computed.

    Attributes:
        instance: The prefill engine, from which the KV is read.
        params: Place of the KV, as vLLM's ``kv_transfer_params``.
    """

    instance: Instance
    params: dict[str, Any]


@dataclass(eq=False, slots=True)
class OpenRequest:
    """One open request.

    Attributes:
        core: As vLLM made it, with all media; videos may be divided.
        here: Identifiers of items that the answering engine must encode.
        decided: Its present try has begun, has ended, or must be sent again.
        begun: A part of the answer is out: no other engine can give the rest.
        again: Why it must be sent again.
        awaited: Items whose encode jobs have not ended.
        held: Items that its engine has by what it said, and has not asked for.
        requested: Set when an encoder is to be asked for a transfer's item, and when it is decided.
        tokens: Of the prompt, that its engine most likely has to compute.
        kv: KV of the prompt, where a prefill engine has computed it.
    """

    job_grace_s: ClassVar[float] = JOB_GRACE_S
    """Longest time for encode jobs after the first token, in seconds."""

    core: EngineCoreRequest
    here: set[str] = field(default_factory=set)
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    begun: bool = False
    again: str = ""
    awaited: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    requested: dict[str, asyncio.Event] = field(default_factory=dict)
    tokens: int = 0
    kv: PrefilledKv | None = None
    task: asyncio.Task[None] | None = None

    def kv_held(self) -> AbstractContextManager[object]:
        """Return a context in which the engine that has the KV counts as in use."""
        return contextlib.nullcontext() if self.kv is None else self.kv.instance.held()

    def decide(self) -> None:
        """Release what waits for it: it is `decided`."""
        self.decided.set()
        for requested in self.requested.values():
            requested.set()


def blocks_of(core: EngineCoreRequest) -> list[int]:
    """Return a prompt as a chain of names of its blocks: equal as far as two begin alike."""
    tokens, last, found = core.prompt_token_ids or [], hash(core.cache_salt), []
    items = {each.mm_position.offset: each.identifier for each in core.mm_features or ()}
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        end = start + BLOCK_TOKENS
        names = tuple(name for offset, name in items.items() if start <= offset < end)
        last = hash((last, names, *tokens[start:end]))
        found.append(last)
    return found
