"""A request at the front: its items, the choices of engines for it, and the jobs for its items.

Engines are chosen by the default rules, by `front.choice`, or by headers of a trusted gateway
(`epd_portable.front.headers`). An item goes to one encode engine after another, until one has
encoded it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import anyio
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from epd_portable.config.roles import Stage
from epd_portable.config.secret import Secret
from epd_portable.front.engines import Engines
from epd_portable.front.exchange import FrontExchange, GracefulHTTPError, exchange
from epd_portable.front.metrics import FrontMetrics
from epd_portable.front.spans import Spans, set_end
from epd_portable.log import trace
from epd_portable.placement.admission import QueuedRequest
from epd_portable.placement.assignment import (
    JOB_GRACE_S,
    Assignment,
    EncodeFailure,
    EncodeTries,
    FailureKind,
    RetryBudget,
)
from epd_portable.placement.estimates import NO_PROMPT, EncodeTimes, Prompt
from epd_portable.placement.instances import (
    EndpointPool,
    InFlight,
    Instance,
    WentDownError,
    bounded_load,
    while_up,
)
from epd_portable.placement.profiles.policy import BLOCK_TOKENS, Policy
from epd_portable.placement.profiles.selection_types import Decision, SelectionRequest
from epd_portable.transfer.stores.lookup import StoredItem
from epd_portable.vllm_plugin.requests import blocks_of, encode_request, without_items
from epd_portable.vllm_plugin.video_parts import is_part
from epd_portable.wire.params import EncodeTransfer

if TYPE_CHECKING:
    from epd_portable.front.client import FrontSettings

logger = logging.getLogger(__name__)

_COLOURS = 3
_BY_PROMPT = "the prompt's beginning, then the least load"


class UnavailableError(GracefulHTTPError):
    """No engine can serve a request at the moment: 503."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}: try again in a few seconds", HTTPStatus.SERVICE_UNAVAILABLE)


class StoppedError(UnavailableError):
    """The front is being stopped: 503."""

    def __init__(self) -> None:
        super().__init__("this server is being stopped")


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


class PrefilledKv(NamedTuple):
    """KV of a prompt: the prefill engine that has it, and vLLM's ``kv_transfer_params``."""

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
        """Replace missing items by text."""
        self.core = without_items(self.core, self.missing, words)
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


# Choices of engines.


def selection_of(pool: EndpointPool, policy: Policy | None, one: OpenRequest) -> EngineChoices:
    """Return the choices for a request."""
    return (EngineChoices if policy is None else _ByPolicy)(pool, one, policy)


class EngineChoices:
    """Choices by the default rules.

    A request goes to the engine with most of its prompt's beginning, or with the least load. Items
    go by hash, below a bound of load.

    Attributes:
        decode: Engine that is to generate.
        is_elastic: The engine that generates may encode items itself where that ends sooner.
    """

    is_elastic = True

    def __init__(self, pool: EndpointPool, one: OpenRequest, policy: Policy | None = None) -> None:
        self.pool = pool
        self.one = one
        self.policy: Any = policy
        self.prompt = self._prompt()
        self.decode: Instance | None = None

    def _prompt(self) -> Prompt:
        return prompt_of(self.one)

    def choose_engine(self) -> Instance | None:
        """Return the usable engine that should generate; ``None`` if there is none."""
        chosen = self._nearest("decode") or self.pool.choose_least_loaded()
        return self.explain("decode", chosen, _BY_PROMPT)

    def disaggregates_prefill(self) -> bool:
        """Return whether another engine than the one that decodes should prefill."""
        return True

    def choose_prefill(self, tried: Collection[str]) -> Instance | None:
        """Return the usable engine that should prefill; none of those names."""
        chosen = self._nearest("prefill", tried)
        chosen = chosen or self.pool.choose_least_loaded(tried, "prefill")
        return self.explain("prefill", chosen, _BY_PROMPT)

    def stay(self, items: Sequence[FrontItem], engine: Instance) -> Collection[str]:
        """Return the names of items that the engine should encode itself."""
        return ()

    def choose_encoder(self, item: FrontItem, exclude: Collection[str]) -> Instance | None:
        """Return the usable engine that should encode an item; none of those names."""
        # The first token waits for the last part of a video.
        first = _pending if item.is_part else None
        chosen = self.pool.choose_encoder(item.item_uuid, exclude, first=first, item=item)
        by = "an item's hash, below the load bound, where it does not end late"
        return self.explain("encode", chosen, by, item=item.item_uuid)

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
        if self.explains:
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

    def explain(
        self,
        stage: Stage,
        chosen: Instance | None,
        by: str,
        *,
        item: str = "",
        header: str = "",
        among: Collection[Instance] | None = None,
        otherwise: str = "none is left",
    ) -> Instance | None:
        """Log a choice by load, and return it.

        Args:
            among: Engines to choose from; by default all of the stage.
            otherwise: Reason where none is chosen.
        """
        if self.explains:
            there = self.pool.of_duty(stage)
            left = [each for each in (there if among is None else among) if each.health.usable]
            decision = Decision(
                stage=stage,
                item=item,
                profile="" if header else "default",
                header=header,
                filters={"there": len(there), "usable": len(left)},
                totals={each.name: -each.load for each in left},
                winner=chosen.name if chosen else "",
                reason=f"by {by}; total is minus the load" if chosen else otherwise,
            )
            self.record(decision)
        return chosen


class _ByPolicy(EngineChoices):
    """Choices by a configuration."""

    _together = ""
    """Reason for which one engine prefills and decodes."""

    def _prompt(self) -> Prompt:
        self._chance = f"{self.pool.chance.getrandbits(64):x}"
        if not self.policy.wants_blocks:
            return NO_PROMPT
        return prompt_of(self.one, self.policy.block_tokens, self.policy.most_blocks)

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
        name = request.item.item_uuid if request.item else ""
        decision = Decision(stage=request.stage, item=name) if self.explains else None
        chosen: Instance | None = self.policy.choose(request, candidates, decision)
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


def prompt_of(one: OpenRequest, size: int = BLOCK_TOKENS, most: int = 1 << 30) -> Prompt:
    """Return a request's prompt as at most so many blocks of so many tokens."""
    blocks = blocks_of(one.core, size)[:most]
    ends = range(size, size * (len(blocks) + 1), size)
    return Prompt(blocks, ends, len(one.core.prompt_token_ids or ()))


def _pending(encoder: Instance) -> tuple[float, float]:
    return encoder.pending_encode_s / encoder.weight, encoder.load / encoder.weight


# Encode jobs.


@dataclass(eq=False)
class ItemJobs:
    """Jobs of all open requests.

    Attributes:
        retries: What failed jobs and requests may spend together.
        job_s: Longest time of one job; ``None`` for any.
        adapts_encoders: LoRA adapters change encoder outputs (vLLM's
            ``enable_tower_connector_lora``), so jobs name those of their requests.
        open: Jobs that have not ended, by name.
        requested: Set when an encoder is to be chosen for an item; by transfer, of all requests.
        resets: Changes when encoders may have forgotten what they encoded: calls of all engines.
    """

    settings: FrontSettings
    engines: Engines
    metrics: FrontMetrics
    retries: RetryBudget
    job_s: float | None = None
    adapts_encoders: bool = False
    spans: Spans | None = None
    requested: dict[str, asyncio.Event] = field(default_factory=dict)
    resets: int = 0
    open: dict[str, asyncio.Future[FinishReason | EncodeFailure]] = field(default_factory=dict)

    @property
    def times(self) -> EncodeTimes:
        """Times of encode jobs."""
        return self.engines.pool.encode_times

    def take_output(self, output: EngineCoreOutput) -> None:
        """Take in an output that may be the end of a job."""
        answer = self.open.get(output.request_id)
        if output.finish_reason is not None and answer and not answer.done():
            answer.set_result(output.finish_reason)

    def fail(self, job: str, failure: EncodeFailure) -> None:
        """Take in why an engine of another machine has not done a job."""
        answer = self.open.get(job)
        if answer and not answer.done():
            answer.set_result(failure)

    def choose_encoder(
        self, one: OpenRequest, item: FrontItem, exclude: Collection[str], taker: str
    ) -> Instance | None:
        """Return who should encode an item for an engine; not one whose items that refuses.

        A request that compares engines may go to any. Others get none of an engine that is not
        compared yet, but where no other can encode.
        """
        full = [each.name for each in self.engines.by_name.values() if each.is_full]
        engine = self.engines.by_name[taker]
        exclude = [*exclude, *engine.incompatible, *full]
        if one.exchange.samples is not None:
            return one.selection.choose_encoder(item, exclude)
        exclude += engine.refused
        chosen = one.selection.choose_encoder(item, [*exclude, *engine.unchecked])
        if chosen is None and engine.unchecked and not self.settings.can_encode:
            chosen = one.selection.choose_encoder(item, exclude)
        return chosen

    async def deliver(
        self, one: OpenRequest, way: Assignment[FrontItem], transfer: EncodeTransfer, use: InFlight
    ) -> None:
        """Have an item encoded, by one encoder after another, until the response begins.

        An encoder that goes down after its job may not have written the item yet, and one without
        memory for the item never does.
        """
        item, encoder = way.item, way.encoder
        requested = one.requested[transfer.transfer_id]
        if way.by in ("held", "stored"):
            await requested.wait()
            if one.decided.is_set():
                if way.by == "stored" and not one.again:
                    self.metrics.items.labels("stored").inc()
                return
            requested.clear()
            if way.by == "stored":
                one.stored[item.item_uuid].usable = False
            one.held.discard(item.item_uuid)
            one.awaited.add(item.item_uuid)
            self.engines.pool.work.item_came(item, self.times.of(item))
            encoder = self.choose_encoder(one, item, [use.instance.name], use.instance.name)
        first = encoder
        tries = EncodeTries(
            lambda exclude: self.choose_encoder(
                one, item, [*exclude, use.instance.name], use.instance.name
            ),
            self.retries,
            deadline_s=time.monotonic() + self.settings.wait_timeout_s,
        )
        can_encode, order = self.settings.can_encode, self.settings.front.encode_order
        in_turn = order == "sequential"
        while encoder is not None:
            job, resets = f"{transfer.transfer_id}-{encoder.name}", self.resets
            try:
                with while_up(encoder.in_flight(item.item_uuid)):
                    one.release(item.item_uuid)
                    async with one.turn if in_turn else contextlib.nullcontext():
                        if one.decided.is_set():
                            return
                        one.selection.note_job(item, encoder)
                        # The first token may come before the reply to the job.
                        one.exchange.encoded[item.item_uuid] = encoder
                        with encoder.encoding(self.expected_s(item, encoder)):
                            failure = await self._encode(one, item, transfer, encoder, job)
                    if failure is None:
                        self.metrics.jobs.labels(encoder.name, "encoded").inc()
                        one.awaited.discard(item.item_uuid)
                        if not one.awaited:
                            use.compute()
                        await requested.wait()
                        if one.decided.is_set():
                            if not one.again:
                                outcome = "encoded" if encoder is first else "retried"
                                self.metrics.items.labels(outcome).inc()
                            return
                        requested.clear()
                        one.awaited.add(item.item_uuid)
                        failure = EncodeFailure(kind=FailureKind.GAVE_UP, reason="gave the item up")
            except WentDownError as error:
                failure = EncodeFailure(kind=FailureKind.LOST, reason=str(error))
            assert failure is not None
            one.exchange.encoded.pop(item.item_uuid, None)
            if resets != self.resets:
                # It has forgotten the item with others, in a reset: that is no failure.
                encoder = self.choose_encoder(one, item, [use.instance.name], use.instance.name)
                continue
            one.selection.note_job(item, encoder, failed=True)
            self.metrics.jobs.labels(encoder.name, failure.kind.value).inc()
            in_turn = order != "concurrent"
            logger.warning("transfer %s: encoder %s: %s", job, encoder.name, failure.reason)
            pause_s = tries.note_failure(encoder.name, failure, time.monotonic())
            await asyncio.sleep(pause_s)
            encoder = tries.next_encoder()
        if one.begun:
            return  # It was there before.
        self.metrics.items.labels("local" if can_encode else "left_out").inc()
        one.again = tries.describe() if first else "no encode engine is up"
        (one.here if can_encode else one.missing).add(item.item_uuid)
        one.decide()

    def expected_s(self, item: FrontItem, encoder: Instance | None = None) -> float:
        """Return the expected seconds of encoding, by an engine or by the average of all.

        API servers share engines: what one gives an engine meanwhile, each does.
        """
        name = "" if encoder is None else encoder.name
        return len(self.settings.sockets) * self.times.of(item, name)

    async def _encode(
        self,
        one: OpenRequest,
        item: FrontItem,
        transfer: EncodeTransfer,
        encoder: Instance,
        job: str,
    ) -> EncodeFailure | None:
        """Have one item encoded by one encoder; return why it was not."""
        begun, tokens = time.monotonic(), item.feature.mm_position.length
        trace("encode_job", transfer_id=transfer.transfer_id, encoder=encoder.name)
        request = self._request(one.core, item.feature, transfer, job)
        if self.spans is None:
            failure = await self._ended(request, encoder)
        else:
            with self.spans.job("encode", one.core, encoder.name, tokens, item.item_uuid) as span:
                failure = await self._ended(request, encoder)
                end = failure.kind.value if failure else "encoded"
                set_end(span, end, failed=failure is not None)
        if failure is not None:
            return failure
        now = time.monotonic()
        # Until it had done the job before, it did not work on this one.
        self.times.observe(item, now - max(begun, encoder.answered_at), encoder.name)
        encoder.answered_at = now
        self.metrics.encode_s.labels(encoder.name).observe(now - begun)
        return None

    async def _ended(self, request: EngineCoreRequest, encoder: Instance) -> EncodeFailure | None:
        engine, job = self.engines.by_name[encoder.name], request.request_id
        client = engine.client
        answer = self.open[job] = asyncio.get_running_loop().create_future()
        try:
            with anyio.move_on_after(self.job_s):
                await engine.add(request)
                await answer
        finally:
            del self.open[job]
            if not answer.done() or answer.cancelled():
                with anyio.CancelScope(shield=True):
                    await engine.abort(client, job)
        if not answer.done() or answer.cancelled():
            late = f"did not end the job within {self.job_s:g} s"
            return EncodeFailure(kind=FailureKind.TIMEOUT, reason=late)
        reason = answer.result()
        if isinstance(reason, EncodeFailure):
            return reason
        if reason in (FinishReason.ERROR, FinishReason.ABORT):
            return EncodeFailure(kind=FailureKind.ERROR, reason=f"ended the job with {reason}")
        return None

    def _request(
        self, core: EngineCoreRequest, feature: Any, transfer: EncodeTransfer, job: str
    ) -> EngineCoreRequest:
        place = feature.mm_position
        assert core.prompt_token_ids is not None
        return encode_request(
            job,
            core.prompt_token_ids[place.offset : place.offset + place.length],
            replace(feature, mm_position=PlaceholderRange(0, place.length, place.is_embed)),
            transfer,
            arrival_time=core.arrival_time,
            lora_request=core.lora_request if self.adapts_encoders else None,
            priority=core.priority,
            trace_headers=core.trace_headers,
        )


def new_transfer(item: FrontItem, consumer: str, secret: Secret) -> EncodeTransfer:
    """Return a transfer of an item, whichever engine encodes it, with its proof.

    Args:
        consumer: Control address of the engine that needs the item.
    """
    transfer_id = uuid.uuid4().hex
    return EncodeTransfer(
        transfer_id=transfer_id,
        item_uuid=item.item_uuid,
        consumer=consumer,
        modality=item.modality,
        proof=secret.sign_transfer(transfer_id, item.item_uuid, consumer),
    )
