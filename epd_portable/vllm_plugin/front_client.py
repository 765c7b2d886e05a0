"""The engine client that knows the split: vLLM's requests to several engines, and their outputs.

`SplitClient` is to vLLM's ``AsyncLLM`` what a client of one engine is. A request goes to one
prefill+decode engine and each of its items, at the same moment, to an encode engine; the connector
below brings the item from one to the other. Pixels go to the engine that encodes them.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError
from vllm.multimodal.inputs import PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import AsyncMPClient

from epd_portable.config.secret import Secret
from epd_portable.delivery.elastic import EncodeTimes, count_local_first
from epd_portable.delivery.fallbacks import RetryBudget
from epd_portable.delivery.ring import HashRing
from epd_portable.vllm_plugin.front_engines import Engine, Engines
from epd_portable.vllm_plugin.metadata import ItemMetadata
from epd_portable.wire.params import (
    EncodeParams,
    EncodeTransfer,
    ExpectedTransfer,
    PrefillParams,
    to_params,
)

logger = logging.getLogger(__name__)

MAX_ENCODERS = 2
MAX_TRIES = 3
FIELD = "ec_transfer_params"


class UnavailableError(GracefulHTTPError):
    """No engine can serve a request at the moment: 503."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.SERVICE_UNAVAILABLE)


class FullError(GracefulHTTPError):
    """Every encode engine has as much as it takes, and nobody else can encode: 429."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.TOO_MANY_REQUESTS)


@dataclass(eq=False, slots=True)
class Item:
    """One item of a request on its way from an encode engine.

    Attributes:
        job: Id of the encode request that brings it, ``""`` when that has been answered.
        estimate_s: What its encoding is expected to take.
    """

    request: Request
    feature: Any
    transfer_id: str
    encoder: Engine
    job: str = ""
    estimate_s: float = 0.0
    sent_at: float = 0.0
    failed: set[str] = field(default_factory=set)

    @property
    def modality(self) -> Any:
        """See `SizedItem`."""
        return self.feature.modality

    @property
    def pixels(self) -> int:
        """See `SizedItem`: the engine's own measure of size."""
        return int(self.feature.mm_position.length)


@dataclass(eq=False, slots=True)
class Request:
    """One request that is open.

    Attributes:
        core: As vLLM made it, with all media.
        engine_id: Its id at `pd`: a new one with each try, because vLLM may handle an abort late.
        here: Identifiers of items that must be encoded by `pd`.
        begun: A part of the answer is out: no other engine can give the rest.
    """

    core: EngineCoreRequest
    pd: Engine
    engine_id: str
    items: dict[str, Item] = field(default_factory=dict)
    here: set[str] = field(default_factory=set)
    tries: int = 0
    begun: bool = False


class SplitClient(AsyncMPClient):
    """See the module.

    Args:
        config: Of the front.
        engines: To be served by.
        secret: Of the launcher's run.
        path: Unix socket for engines.
        fail: Ends a request with an error that it has not begun to answer.
        elastic: Prefill+decode engines may encode when that ends sooner, if it takes the encoders
            so many times longer; 0 for never.
        can_encode: They hold the vision tower.
    """

    def __init__(
        self,
        config: VllmConfig,
        engines: list[Any],
        *,
        secret: Secret,
        path: Path,
        elastic: float,
        can_encode: bool,
    ) -> None:
        self.vllm_config = config
        self.resources = SimpleNamespace(engine_dead=False)
        self.engines_running = False
        self.fail: Callable[[str, Exception], None] = lambda request_id, error: None
        self.engines = Engines(
            engines, path, config, outputs=self._take_outputs, gone=self._engine_gone
        )
        self.engine_ranks_managed = [each.index for each in self.engines.all]
        self._secret = secret
        self._elastic = elastic if can_encode else 0.0
        self._can_encode = can_encode
        self._metadata = ItemMetadata(config)
        self._open: dict[str, Request] = {}
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._times = EncodeTimes()
        self._retries = RetryBudget()
        self._ring: HashRing[Engine] = HashRing(e for e in self.engines.all if e.encodes_only)

    # -- what vLLM's AsyncLLM calls ---------------------------------------------------------------

    def shutdown(self, timeout: float | None = None) -> None:
        """Let go of every engine."""
        self.resources.engine_dead = True
        self.engines.close()

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return what one of the engines has put out."""
        return await self._outputs.get()

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call every engine, and return what the first that answers requests says."""
        return (await self.call_utility_all_async(method, *args))[0]

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        """Call every engine that is up; those that answer requests come first."""
        engines = self.engines.answering
        if not engines:
            raise UnavailableError("no prefill+decode engine is up: try again in a few seconds")
        clients = [each.client for each in [*engines, *self.engines.encoders]]
        calls = [client.call_utility_async(method, *args) for client in clients if client]
        return (await asyncio.gather(*calls))[: len(engines)]

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Send a request to the engines that serve it.

        Raises:
            GracefulHTTPError: There is none, or they have too much.
        """
        known = self._open.get(request.request_id)
        if known is not None and known.pd.client:  # a further part of a session
            await known.pd.client.add_request_async(request)
            return
        self._retries.count_request()
        opened = Request(request, self._choose_pd(()), request.request_id)
        self._check_room(opened)
        self._open[request.request_id] = opened
        await self._send(opened)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """End requests, wherever they are."""
        for request_id in request_ids:
            if (opened := self._open.pop(request_id, None)) is not None:
                await self._withdraw(opened)

    # -- requests ---------------------------------------------------------------------------------

    def _choose_pd(self, tried: Iterable[Engine]) -> Engine:
        usable = [each for each in self.engines.answering if each not in tried]
        if not usable:
            raise UnavailableError("no prefill+decode engine is up: try again in a few seconds")
        return min(usable, key=lambda each: (each.load + 1) / each.weight)

    def _check_room(self, opened: Request) -> None:
        """Refuse what encode engines have no room for and nobody else can encode."""
        if self._can_encode or not opened.core.mm_features:
            return
        if not self.engines.encoders:
            raise UnavailableError("no encode engine is up: try again in a few seconds")
        if not self._with_room(()):
            raise FullError("every encode engine has max_queued_items items: try again later")

    def _with_room(self, failed: Iterable[str]) -> list[Engine]:
        return [
            each
            for each in self.engines.encoders
            if each.name not in failed and each.load < each.settings.max_queued_items
        ]

    def _choose_encoder(self, identifier: str, failed: Iterable[str]) -> Engine | None:
        usable = self._with_room(failed)
        if not usable:
            return None
        load, weight = sum(each.load for each in usable), sum(each.weight for each in usable)
        others = [each for each in self._ring.members if each not in usable]
        return self._ring.choose(identifier, load, weight, others)

    async def _send(self, opened: Request) -> None:
        """Send a request to its engine, and its items to encoders."""
        core, pd = opened.core, opened.pd
        assert pd.client is not None
        opened.tries += 1
        pd.work[opened.engine_id] = opened
        sent = copy.copy(core)
        sent.request_id = opened.engine_id
        if core.sampling_params is not None:
            opened.items = self._distribute(opened)
            sent.mm_features, expected = self._for_pd(opened)
            sent.sampling_params = copy.copy(core.sampling_params)
            extra = {k: v for k, v in (sent.sampling_params.extra_args or {}).items() if k != FIELD}
            if expected:
                extra[FIELD] = to_params(PrefillParams(transfers=tuple(expected)))
            sent.sampling_params.extra_args = extra or None
        await pd.client.add_request_async(sent)
        for item in list(opened.items.values()):
            await self._encode(item)

    def _distribute(self, opened: Request) -> dict[str, Item]:
        """Choose an encoder for each distinct item, but for those that its engine encodes."""
        if opened.core.resumable:
            return {}
        features = {each.identifier: each for each in opened.core.mm_features or ()}
        items = []
        for identifier, feature in features.items():
            encoder = None
            if identifier not in opened.here and feature.data is not None:
                encoder = self._choose_encoder(identifier, ())
            if encoder is not None:
                item = Item(opened, feature, uuid.uuid4().hex, encoder)
                item.estimate_s = self._times.of(item)
                items.append(item)
        if self._elastic and len(items) == len(features):
            here = SimpleNamespace(
                pending_encode_s=0.0, computes_for=len(opened.pd.work) - 1
            )
            count, _ = count_local_first(
                [each.estimate_s for each in items],
                [each.encoder for each in items],
                here,
                threshold=self._elastic,
            )
            items = items[count:]
        return {each.feature.identifier: each for each in items}

    def _for_pd(self, opened: Request) -> tuple[list[Any] | None, list[ExpectedTransfer]]:
        """Return the items as the engine that answers gets them, and what it is to expect."""
        features, expected = [], {}
        for feature in opened.core.mm_features or ():
            item = opened.items.get(feature.identifier)
            bare = self._metadata.without_media(feature) if item is not None else None
            features.append(bare or feature)
            if item is not None:
                expected[feature.identifier] = ExpectedTransfer(
                    transfer_id=item.transfer_id,
                    item_uuid=feature.identifier,
                    encoder=item.encoder.name,
                    modality=feature.modality,
                    media=bare is None,
                )
        return features or None, list(expected.values())

    async def _withdraw(self, opened: Request) -> None:
        """Take a request from its engine, and its items from encoders."""
        for item in opened.items.values():
            await self._cancel(item)
        opened.items = {}
        if opened.pd.work.pop(opened.engine_id, None) and opened.pd.client:
            await opened.pd.client.abort_requests_async([opened.engine_id])

    async def _again(self, opened: Request, reason: str) -> None:
        """Send a request that has not begun once more, to another engine where its own is gone."""
        await self._withdraw(opened)
        logger.warning("request %s is sent again: %s", opened.core.request_id, reason)
        try:
            if opened.tries >= MAX_TRIES or not self._retries.spend():
                raise UnavailableError(f"{reason}: try again in a few seconds")
            if not opened.pd.client:
                opened.pd = self._choose_pd(())
            opened.engine_id = f"{opened.core.request_id}-try{opened.tries + 1}"
            await self._send(opened)
        except GracefulHTTPError as error:
            self._open.pop(opened.core.request_id, None)
            self.fail(opened.core.request_id, error)

    # -- items ------------------------------------------------------------------------------------

    async def _encode(self, item: Item) -> None:
        """Send an item to its encoder."""
        feature, core, encoder = item.feature, item.request.core, item.encoder
        transfer = EncodeTransfer(
            transfer_id=item.transfer_id,
            item_uuid=feature.identifier,
            consumer=item.request.pd.settings.control,
            modality=feature.modality,
            proof=self._secret.sign_transfer(
                item.transfer_id, feature.identifier, item.request.pd.settings.control
            ),
        )
        place = feature.mm_position
        item.job = f"{item.transfer_id}-{len(item.failed)}"
        item.sent_at = time.monotonic()
        job = EngineCoreRequest(
            request_id=item.job,
            prompt_token_ids=core.prompt_token_ids[place.offset : place.offset + place.length],
            mm_features=[
                replace(feature, mm_position=PlaceholderRange(0, place.length, place.is_embed))
            ],
            sampling_params=SamplingParams(
                max_tokens=1,
                temperature=0,
                extra_args={FIELD: to_params(EncodeParams(transfers=(transfer,)))},
            ),
            pooling_params=None,
            arrival_time=core.arrival_time,
            lora_request=core.lora_request,
            cache_salt=None,
            data_parallel_rank=None,
            priority=core.priority,
            trace_headers=core.trace_headers,
        )
        encoder.work[item.job] = item
        encoder.pending_encode_s += item.estimate_s
        assert encoder.client is not None
        await encoder.client.add_request_async(job)

    def _end_job(self, item: Item) -> bool:
        """Note that an item's job is over; return whether it was under way."""
        job, item.job = item.job, ""
        if item.encoder.work.pop(job, None) is None:
            return False
        left = item.encoder.pending_encode_s - item.estimate_s
        item.encoder.pending_encode_s = left if item.encoder.work else 0.0
        return True

    async def _cancel(self, item: Item) -> None:
        job = item.job
        if self._end_job(item) and item.encoder.client:
            await item.encoder.client.abort_requests_async([job])

    async def _lost(self, item: Item, reason: str) -> None:
        """Have an item encoded by another encoder, or else by the engine that waits for it."""
        opened, identifier = item.request, item.feature.identifier
        await self._cancel(item)
        logger.warning("transfer %s: encoder %s %s", item.transfer_id, item.encoder.name, reason)
        item.failed.add(item.encoder.name)
        another = None
        if len(item.failed) < MAX_ENCODERS and self._retries.spend():
            another = self._choose_encoder(identifier, item.failed)
        if another is not None:
            item.encoder = another
            await self._encode(item)
        elif self._can_encode:
            opened.here.add(identifier)
            await self._again(opened, f"encoder {item.encoder.name} {reason}")
        else:
            await self._withdraw(opened)
            self._open.pop(opened.core.request_id, None)
            self.fail(
                opened.core.request_id,
                UnavailableError("no encode engine can encode an item: try again later"),
            )

    # -- engines ----------------------------------------------------------------------------------

    async def _take_outputs(self, engine: Engine, outputs: EngineCoreOutputs) -> None:
        outputs.engine_index = engine.index
        if engine.encodes_only:
            await self._encoded(engine, outputs)
        else:
            await self._answered(engine, outputs)
        self._outputs.put_nowait(outputs)

    async def _encoded(self, engine: Engine, outputs: EngineCoreOutputs) -> None:
        ended, outputs.outputs = outputs.outputs, []
        for output in ended:
            item = engine.work.get(output.request_id) if output.finished else None
            if item is None:
                continue
            self._end_job(item)
            if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                await self._lost(item, "could not encode it")
            else:
                self._times.observe(item, time.monotonic() - item.sent_at)

    async def _answered(self, engine: Engine, outputs: EngineCoreOutputs) -> None:
        kept: list[EngineCoreOutput] = []
        for output in outputs.outputs:
            opened = engine.work.get(output.request_id)
            if opened is None:
                continue  # It was aborted, or sent again.
            if output.finish_reason is FinishReason.ERROR and not opened.begun:
                opened.here.update(opened.items if self._can_encode else ())
                await self._again(opened, f"engine {engine.name} could not compute it")
                continue
            if not opened.begun and (output.new_token_ids or output.finished):
                opened.begun = True
                for item in opened.items.values():
                    await self._cancel(item)
            output.request_id = opened.core.request_id
            if output.finished:
                del engine.work[opened.engine_id]
                self._open.pop(opened.core.request_id, None)
            kept.append(output)
        outputs.outputs = kept

    async def _engine_gone(self, engine: Engine) -> None:
        """Serve elsewhere what an engine had and has not begun; end the rest."""
        had = list(engine.work.values())
        engine.work.clear()
        engine.pending_encode_s = 0.0
        if engine.encodes_only:
            for opened in list(self._open.values()):
                for item in list(opened.items.values()):
                    if item.encoder is engine and not opened.begun:
                        await self._lost(item, "is gone")
            return
        begun = [each for each in had if each.begun]
        for opened in begun:
            self._open.pop(opened.core.request_id, None)
        ends = [
            EngineCoreOutput(each.core.request_id, [], finish_reason=FinishReason.ERROR)
            for each in begun
        ]
        self._outputs.put_nowait(EngineCoreOutputs(engine_index=engine.index, outputs=ends))
        for opened in had:
            if not opened.begun:
                await self._again(opened, f"engine {engine.name} is gone")
