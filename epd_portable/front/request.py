"""A request at the front, its items, and the errors that clients get when it cannot be served."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.engine import EngineCoreRequest

from epd_portable.front.exchange import FrontExchange, exchange
from epd_portable.placement.admission import QueuedRequest
from epd_portable.placement.assignment import JOB_GRACE_S
from epd_portable.placement.instances import Instance
from epd_portable.transfer.stores.lookup import StoredItem
from epd_portable.vllm_plugin import compat
from epd_portable.vllm_plugin.video_parts import is_part

if TYPE_CHECKING:
    from epd_portable.front.selection import EngineChoices

GracefulHTTPError: Any = compat.graceful_error()
_COLOURS = 3


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
        """Its size as the processor made it, estimated: tokens where that is not here."""
        fields = self.feature.data
        if fields is None:
            return int(self.feature.mm_position.length)
        sizes = [
            each.data.numel()
            for name, each in fields.items()
            if name.startswith(("pixel_values", "input_features")) and hasattr(each.data, "numel")
        ]
        # Models that read frames by pairs get a still image twice.
        twice = 1 + (self.modality == "image" and "image_grid_thw" in fields)
        return sum(sizes) // (_COLOURS * twice) or int(self.feature.mm_position.length)

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


@dataclass(eq=False)
class OpenRequest:
    """One open request.

    Attributes:
        core: As vLLM made it, with all media; videos may be divided.
        here: Identifiers of items that the answering engine must encode.
        missing: Identifiers of items that no engine can encode.
        decided: Its present try has begun, has ended, or must be sent again.
        begun: A part of the answer is out: no other engine can give the rest.
        again: Why it must be sent again.
        refused: Reason why no engine can ever compute it, with limit and remedy.
        awaited: Items whose encode jobs have not ended.
        held: Items that its engine has by what it said, and has not asked for.
        requested: Set when an encoder is to be asked for a transfer's item, and when it is decided.
        tokens: Of the prompt, that its engine most likely has to compute.
        kv: KV of the prompt, where a prefill engine has computed it.
        stored: Its items that the store has.
        exchange: The HTTP request that it is of.
        selection: Chooses engines for it.
        turn: Held by the encode job that runs, where jobs run one after the other.
        ticket: Place that admission gave the request; ``None`` without limits.
    """

    job_grace_s: ClassVar[float] = JOB_GRACE_S
    """Longest time for encode jobs after the first token, in seconds."""

    core: EngineCoreRequest
    here: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    begun: bool = False
    again: str = ""
    refused: str = ""
    awaited: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    requested: dict[str, asyncio.Event] = field(default_factory=dict)
    tokens: int = 0
    stored: dict[str, StoredItem] = field(default_factory=dict)
    exchange: FrontExchange = field(default_factory=lambda: exchange.get(None) or FrontExchange())
    selection: EngineChoices = field(init=False)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    kv: PrefilledKv | None = None
    task: asyncio.Task[None] | None = None
    ticket: QueuedRequest | None = None

    @functools.cached_property
    def items(self) -> list[FrontItem]:
        """Its distinct items that engines may bring, in their order."""
        if self.core.sampling_params is None:
            return []
        found: dict[str, FrontItem] = {}
        for feature in self.core.mm_features or ():
            found.setdefault(feature.identifier, FrontItem(feature))
        return [*found.values()]

    def note_items(self, params: dict[str, Any] | None) -> None:
        """Record the items in an engine's last output for this request (`PrefillOutcome`)."""
        for each in (params or {}).get("items", ()):
            self.exchange.items.setdefault(each["mm_hash"], each)

    def leave_out(self, words: Callable[[str], list[int]]) -> None:
        """Replace missing items by text.

        Args:
            words: Returns the tokens of a text.
        """
        self.core = _without(self.core, self.missing, words)
        self.exchange.left_out |= self.missing
        self.missing = set()
        self.__dict__.pop("items", None)

    def kv_held(self) -> AbstractContextManager[object]:
        """Return a context in which the engine that has the KV counts as in use."""
        return contextlib.nullcontext() if self.kv is None else self.kv.instance.retained()

    def decide(self) -> None:
        """Release what waits for it: it is `decided`."""
        self.decided.set()
        for requested in self.requested.values():
            requested.set()


def blocks_of(core: EngineCoreRequest, size: int) -> list[int]:
    """Return a prompt as a chain of names of its blocks: equal as far as two begin alike.

    Args:
        size: Tokens of a block.
    """
    tokens, last, found = core.prompt_token_ids or [], hash(core.cache_salt), []
    items = {each.mm_position.offset: each.identifier for each in core.mm_features or ()}
    for start in range(0, len(tokens) - size + 1, size):
        end = start + size
        names = tuple(name for offset, name in items.items() if start <= offset < end)
        last = hash((last, names, *tokens[start:end]))
        found.append(last)
    return found


def _without(
    core: EngineCoreRequest, names: Collection[str], words: Callable[[str], list[int]]
) -> EngineCoreRequest:
    """Return a request with a text in the place of some of its items."""
    tokens, features, begin = core.prompt_token_ids or [], [], 0
    prompt: list[int] = []
    for feature in core.mm_features or ():
        place = feature.mm_position
        if feature.identifier in names:
            prompt += tokens[begin : place.offset] + words(f"[{feature.modality} not available]")
            begin = place.offset + place.length
        else:
            offset = len(prompt) + place.offset - begin
            features.append(replace(feature, mm_position=replace(place, offset=offset)))
    changed = copy.copy(core)
    changed.prompt_token_ids = prompt + tokens[begin:]
    changed.mm_features = features or None
    return changed
