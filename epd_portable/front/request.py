"""A request at the front: its items, the choices of engines for it, and its errors.

Engines are chosen by the default rules, by `front.choice`, or by headers of a trusted gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, ClassVar

from vllm.v1.engine import EngineCoreRequest

from epd_portable.front.exchange import (
    CACHE_KEY,
    ENCODERS,
    MODEL,
    PREFILLER,
    FrontExchange,
    GracefulHTTPError,
    Hints,
    exchange,
)
from epd_portable.placement.admission import QueuedRequest
from epd_portable.placement.assignment import JOB_GRACE_S
from epd_portable.placement.estimates import NO_PROMPT, Prompt
from epd_portable.placement.instances import EndpointPool, Instance
from epd_portable.placement.profiles.policy import BLOCK_TOKENS, Policy
from epd_portable.placement.profiles.selection_types import (
    MOST_SHOWN,
    Decision,
    SelectionRequest,
    Stage,
)
from epd_portable.placement.ring import bounded_load
from epd_portable.transfer.stores.lookup import StoredItem
from epd_portable.vllm_plugin.video_parts import is_part

logger = logging.getLogger(__name__)

_COLOURS = 3
_OTHERWISE = "the gateway's other headers count, then the front chooses"


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
    """Item of a request, as decisions see it; `feature` is vLLM's."""

    feature: Any

    @property
    def item_uuid(self) -> str:
        """The engines' identifier, a digest of its content."""
        return str(self.feature.identifier)

    @property
    def modality(self) -> Any:
        """Modality of the item."""
        return self.feature.modality

    @property
    def pixels(self) -> int:
        """Size as the processor made it, estimated: tokens where that is unknown here."""
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
        """Return whether it is a part of a video."""
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
    """An open request.

    Attributes:
        core: As vLLM made it, with all media; videos may be divided.
        here: Identifiers of items that the answering engine must encode.
        missing: Identifiers of items that no engine can encode.
        decided: Its present try has begun, has ended, or must be sent again.
        begun: A part of the response is out: no other engine can give the rest.
        again: Why it must be sent again.
        refused: Reason why no engine can ever compute it, with limit and remedy.
        awaited: Items whose encode jobs have not ended.
        held: Items that its engine has by its reports, and has not requested.
        requested: Set when an encoder is to be chosen for a transfer's item, and when it is
        decided.
        reserved: Places for encode jobs that are assigned and have not started, by ``item_uuid``.
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
    reserved: dict[str, contextlib.ExitStack] = field(default_factory=dict)
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
        """Return its distinct items that engines may deliver, in their order."""
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

    def reserve(self, item_uuid: str, encoder: Instance, expected_s: float) -> None:
        """Count an encode job before it starts: other requests choose encoders meanwhile.

        Args:
            expected_s: Seconds of encoding.
        """
        self.reserved[item_uuid] = reserved = contextlib.ExitStack()
        reserved.enter_context(encoder.in_flight(item_uuid))
        reserved.enter_context(encoder.encoding(expected_s))

    def release(self, *item_uuids: str) -> None:
        """Take `reserve` back for these items."""
        for each in item_uuids:
            if reserved := self.reserved.pop(each, None):
                reserved.close()

    def decide(self) -> None:
        """Release what waits for it: it is `decided`."""
        self.decided.set()
        for requested in self.requested.values():
            requested.set()


def blocks_of(core: EngineCoreRequest, size: int) -> list[int]:
    """Return a prompt as a chain of names of its blocks: equal for a common beginning.

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


# Choices of engines.


def selection_of(pool: EndpointPool, policy: Policy | None, one: OpenRequest) -> EngineChoices:
    """Return the choices for a request."""
    selection = EngineChoices(pool, one) if policy is None else _ByPolicy(pool, one, policy)
    return _ByHeaders(selection, hints) if (hints := one.exchange.hints) else selection


class EngineChoices:
    """Choices by the default rules.

    A request goes to the engine with most of its prompt's beginning, or with the least load. Items
    go by hash, below a bound of load.

    Attributes:
        blocks: The prompt's, see `blocks_of`.
        decode: Engine that is to generate.
        is_elastic: The engine that generates may encode items itself where that ends sooner.
    """

    is_elastic = True

    def __init__(self, pool: EndpointPool, one: OpenRequest) -> None:
        self.pool = pool
        self.one = one
        self.prompt = prompt_of(one)
        self.decode: Instance | None = None

    def choose_engine(self) -> Instance | None:
        """Return the usable engine that should generate; ``None`` if there is none."""
        chosen = self._nearest("decode") or self.pool.choose_least_loaded()
        return self._explained("decode", chosen, "the prompt's beginning, then the least load")

    def disaggregates_prefill(self) -> bool:
        """Return whether another engine than the one that decodes should prefill."""
        return True

    def choose_prefill(self, tried: Collection[str]) -> Instance | None:
        """Return the usable engine that should prefill; none of those names."""
        chosen = self._nearest("prefill", tried)
        chosen = chosen or self.pool.choose_least_loaded(tried, "prefill")
        return self._explained("prefill", chosen, "the prompt's beginning, then the least load")

    def stay(self, items: Sequence[FrontItem], engine: Instance) -> Collection[str]:
        """Return the names of items that the engine should encode itself."""
        return ()

    def choose_encoder(self, item: FrontItem, exclude: Collection[str]) -> Instance | None:
        """Return the usable engine that should encode an item; none of those names."""
        # The first token waits for the last part of a video.
        first = _pending if item.is_part else None
        chosen = self.pool.choose_encoder(item.item_uuid, exclude, first=first, item=item)
        by = "an item's hash, below the load bound, where it does not end late"
        return self._explained("encode", chosen, by, item)

    def note_engine(self, engine: Instance) -> int:
        """Record that an engine is to generate; return the tokens that it has to compute."""
        self.decode = engine
        return self.note_prompt(engine)

    def note_prompt(self, engine: Instance) -> int:
        """Record that an engine computes the prompt; return the tokens that it lacks."""
        blocks = self.prompt.blocks
        cached = self.prompt.up_to(engine.cached.prefix(blocks))
        engine.cached.use_prefix(blocks)
        return self.prompt.tokens - cached

    def note_job(self, item: FrontItem, encoder: Instance, *, failed: bool = False) -> None:
        """Record that an encoder gets an item's job, or that the job failed."""

    def record(self, decision: Decision) -> None:
        """Log a decision, where that is wanted."""
        logger.debug("request %s: %s", self.one.core.request_id, json.dumps(decision.shown()))

    @property
    def explains(self) -> bool:
        """Return whether decisions are recorded."""
        return logger.isEnabledFor(logging.DEBUG)

    def _nearest(self, duty: Stage, exclude: Collection[str] = ()) -> Instance | None:
        """Return who has the most of a prompt's beginning, unless others are much less busy."""
        usable = [each for each in self.pool.usable(duty) if each.name not in exclude]
        blocks = self.prompt.blocks
        if len(usable) < 2 or not blocks:
            return None
        most = bounded_load(sum(each.load for each in usable), sum(each.weight for each in usable))
        known = [
            (each.cached.prefix(blocks), each) for each in usable if each.load < most * each.weight
        ]
        count, nearest = max(known, key=lambda pair: pair[0], default=(0, None))
        return nearest if count else None

    def _explained(
        self, stage: Stage, chosen: Instance | None, by: str, item: FrontItem | None = None
    ) -> Instance | None:
        if self.explains:
            there = self.pool.of_duty(stage)
            usable = sorted(
                (each for each in there if each.health.usable), key=lambda each: each.load
            )
            name = item.item_uuid if item else ""
            decision = Decision(stage=stage, item=name, profile="default")
            decision.filters = {"there": len(there), "usable": len(usable)}
            decision.totals = {each.name: -each.load for each in usable[:MOST_SHOWN]}
            decision.winner = chosen.name if chosen else ""
            decision.reason = f"by {by}; total is minus the load" if chosen else "none is left"
            self.record(decision)
        return chosen


class _ByPolicy(EngineChoices):
    """Choices by a configuration."""

    def __init__(self, pool: EndpointPool, one: OpenRequest, policy: Policy) -> None:
        self.pool = pool
        self.one = one
        self.policy = policy
        self.prompt = NO_PROMPT
        if policy.wants_blocks:
            self.prompt = prompt_of(one, policy.block_tokens, policy.most_blocks)
        self.decode = None
        self._together = ""
        self._chance = f"{pool.chance.getrandbits(64):x}"

    def choose_engine(self) -> Instance | None:
        return self._choose(self._request("decode"))

    def note_engine(self, engine: Instance) -> int:
        # Afterwards the whole prompt counts as cached there.
        self._together = self.policy.why_together(self._request("prefill"), engine)
        return super().note_engine(engine)

    def disaggregates_prefill(self) -> bool:
        why = self._together
        if why and self.decode is not None:
            self.record(Decision(stage="prefill", winner=self.decode.name, reason=why))
        return not why

    def choose_prefill(self, tried: Collection[str]) -> Instance | None:
        return self._choose(self._request("prefill"), tried)

    def stay(self, items: Sequence[FrontItem], engine: Instance) -> Collection[str]:
        found = []
        for item in items:
            if why := self.policy.why_together(self._request("encode", item), engine):
                name = item.item_uuid
                self.record(Decision(stage="encode", item=name, winner=engine.name, reason=why))
                found.append(name)
        return found

    def choose_encoder(self, item: FrontItem, exclude: Collection[str]) -> Instance | None:
        return self._choose(self._request("encode", item), exclude)

    def note_prompt(self, engine: Instance) -> int:
        engine.cached.items.use(each.item_uuid for each in self.one.items)
        return super().note_prompt(engine)

    def note_job(self, item: FrontItem, encoder: Instance, *, failed: bool = False) -> None:
        if failed:
            encoder.cached.items.pop(item.item_uuid, None)
        else:
            encoder.cached.items.use((item.item_uuid,))

    def _choose(self, request: SelectionRequest, exclude: Collection[str] = ()) -> Instance | None:
        candidates = [each for each in self.pool.usable(request.stage) if each.name not in exclude]
        decision = None
        if self.explains:
            name = request.item.item_uuid if request.item else ""
            decision = Decision(stage=request.stage, item=name)
        chosen = self.policy.choose(request, candidates, decision)
        if decision is not None:
            self.record(decision)
        return chosen

    def _request(self, stage: Stage, item: FrontItem | None = None) -> SelectionRequest:
        prompt, exchange = NO_PROMPT if item else self.prompt, self.one.exchange
        return SelectionRequest(
            stage=stage,
            key=self._chance,
            model=exchange.model,
            session=exchange.session,
            items=self.one.items,
            item=item,
            prompt=prompt,
        )


class _ByHeaders(EngineChoices):
    """Choices of a trusted gateway; another's where it names nothing.

    Raises:
        GracefulHTTPError: A header numbers more items than there are.
    """

    def __init__(self, inner: EngineChoices, hints: Hints) -> None:
        self.pool = inner.pool
        self.one = inner.one
        self.prompt = inner.prompt
        self._inner = inner
        self._hints = hints
        names = [each.item_uuid for each in self.one.items]
        self._places = {name: place for place, name in enumerate(names)}
        self._by_item = hints.of_items(names)

    @property
    def is_elastic(self) -> bool:  # type: ignore[override]
        return not (self._hints.encoders or self._by_item or self._hints.model)

    def choose_engine(self) -> Instance | None:
        named = self._hints.generator
        return named if named and named.health.usable else self._inner.choose_engine()

    def disaggregates_prefill(self) -> bool:
        return self._hints.prefiller is not None or self._inner.disaggregates_prefill()

    def choose_prefill(self, tried: Collection[str]) -> Instance | None:
        named = self._hints.prefiller
        if named is not None and self._named("prefill", PREFILLER, named, tried):
            return named
        return self._inner.choose_prefill(tried)

    def stay(self, items: Sequence[FrontItem], engine: Instance) -> Collection[str]:
        if self._hints.local:
            return [each.item_uuid for each in items]
        if self._hints.encoders or self._by_item:
            return ()
        return self._inner.stay(items, engine)

    def choose_encoder(self, item: FrontItem, exclude: Collection[str]) -> Instance | None:
        header, named = self._by_item.get(item.item_uuid, ("", None))
        if named is not None and self._named("encode", header, named, exclude, item):
            return named
        chosen = None
        if self._hints.encoders:
            chosen = self._near(ENCODERS, self._hints.encoders, item, exclude)
        if chosen is None and self._hints.model:
            # No other one makes of an item what the language model was trained with.
            return self._near(MODEL, self._hints.of_model, item, exclude)
        if chosen is None and self._hints.cache_key:
            chosen = self._near(CACHE_KEY, self.pool.of_duty("encode"), item, exclude)
        return chosen or self._inner.choose_encoder(item, exclude)

    def note_engine(self, engine: Instance) -> int:
        return self._inner.note_engine(engine)

    def note_prompt(self, engine: Instance) -> int:
        return self._inner.note_prompt(engine)

    def note_job(self, item: FrontItem, encoder: Instance, *, failed: bool = False) -> None:
        self._inner.note_job(item, encoder, failed=failed)

    def _named(
        self,
        stage: Stage,
        header: str,
        named: Instance,
        exclude: Collection[str],
        item: FrontItem | None = None,
    ) -> bool:
        """Return whether a named engine can have it, and log that."""
        fits = named.health.usable and named.name not in exclude
        decision = Decision(stage=stage, item=item.item_uuid if item else "", header=header)
        if fits:
            decision.winner, decision.reason = named.name, "named"
        else:
            why = "was tried or is full" if named.health.usable else f"is {named.health.state}"
            decision.reason = f"{named.name} is named and {why}: {_OTHERWISE}"
        self.record(decision)
        return fits

    def _near(
        self,
        header: str,
        candidates: Collection[Instance],
        item: FrontItem,
        exclude: Collection[str],
    ) -> Instance | None:
        """Return the engine of some that should encode an item, and log why."""
        key = item.item_uuid
        if self._hints.cache_key:
            key = f"{self._hints.cache_key}/{self._places.get(key, key)}"
        left = {each for each in candidates if each.health.usable and each.name not in exclude}
        chosen = self.pool.choose_encoder(key, exclude, left) if left else None
        there = len(self.pool.of_duty("encode"))
        decision = Decision(stage="encode", item=item.item_uuid, header=header)
        decision.filters = {"there": there, header: len(candidates), "usable": len(left)}
        decision.totals = {each.name: -each.load for each in left}
        if chosen is not None:
            decision.winner = chosen.name
            decision.reason = "by a hash, below the load bound; total is minus the load"
        elif header == MODEL:
            decision.reason = "no engine with this model can encode it, and no other may"
        else:
            decision.reason = f"none of these can encode it: {_OTHERWISE}"
        self.record(decision)
        return chosen


def prompt_of(one: OpenRequest, size: int = BLOCK_TOKENS, most: int = 1 << 30) -> Prompt:
    """Return a request's prompt as at most so many blocks of so many tokens."""
    blocks = blocks_of(one.core, size)[:most]
    ends = range(size, size * (len(blocks) + 1), size)
    return Prompt(blocks, ends, len(one.core.prompt_token_ids or ()))


def _pending(encoder: Instance) -> tuple[float, float]:
    return encoder.pending_encode_s / encoder.weight, encoder.load / encoder.weight
