"""Encode jobs: an item goes to one encode engine after another, until one has encoded it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import anyio
from opentelemetry.trace import Span
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from epd_portable.config.secret import Secret
from epd_portable.front.engines import Engines
from epd_portable.front.metrics import FrontMetrics
from epd_portable.front.request import FrontItem, OpenRequest
from epd_portable.front.spans import Spans, set_end
from epd_portable.log import trace
from epd_portable.placement.assignment import (
    Assignment,
    EncodeFailure,
    EncodeTries,
    FailureKind,
    RetryBudget,
)
from epd_portable.placement.instances import InFlight, Instance, WentDownError, while_up
from epd_portable.vllm_plugin.requests import encode_request
from epd_portable.wire.params import EncodeTransfer

logger = logging.getLogger(__name__)

EncodeOrder = Literal["concurrent", "sequential_fallback", "sequential"]


class ItemJobs:
    """Jobs of all open requests.

    Args:
        engines: Which do them.
        metrics: Of the front.
        retries: What failed jobs and requests may spend together.
        servers: API servers of this front: what one gives an engine meanwhile, each does.
        wait_timeout_s: Longest time in which an item must come.
        can_encode: The engine that generates holds the vision tower.
        adapts_encoders: LoRA adapters change encoder outputs (vLLM's
            ``enable_tower_connector_lora``), so jobs name those of their requests.
        order: Key ``front.encode_order``.
        job_s: Longest time of one job; ``None`` for any.
        spans: Makes spans of jobs; ``None`` for none.

    Attributes:
        open: Jobs that have not ended, by name.
        requested: Set when an encoder is to be chosen for an item; by transfer, of all requests.
        resets: Changes when encoders may have forgotten what they encoded: calls of all engines.
    """

    def __init__(
        self,
        engines: Engines,
        metrics: FrontMetrics,
        retries: RetryBudget,
        *,
        servers: int,
        wait_timeout_s: float,
        can_encode: bool,
        adapts_encoders: bool = False,
        order: EncodeOrder = "concurrent",
        job_s: float | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._times = engines.pool.encode_times
        self.requested: dict[str, asyncio.Event] = {}
        self.resets = 0
        self._engines = engines
        self._metrics = metrics
        self._retries = retries
        self._servers = servers
        self._wait_timeout_s = wait_timeout_s
        self._can_encode = can_encode
        self._adapts_encoders = adapts_encoders
        self._order = order
        self._job_s = job_s
        self._spans = spans
        self.open: dict[str, asyncio.Future[FinishReason | EncodeFailure]] = {}

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
        full = [each.name for each in self._engines.by_name.values() if each.is_full]
        engine = self._engines.by_name[taker]
        exclude = [*exclude, *engine.incompatible, *full]
        if one.exchange.samples is not None:
            return one.selection.choose_encoder(item, exclude)
        exclude += engine.refused
        chosen = one.selection.choose_encoder(item, [*exclude, *engine.unchecked])
        if chosen is None and engine.unchecked and not self._can_encode:
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
                    self._metrics.items.labels("stored").inc()
                return
            requested.clear()
            if way.by == "stored":
                one.stored[item.item_uuid].usable = False
            one.held.discard(item.item_uuid)
            one.awaited.add(item.item_uuid)
            self._engines.pool.work.item_came(item, self._times.of(item))
            encoder = self.choose_encoder(one, item, [use.instance.name], use.instance.name)
        first = encoder
        tries = EncodeTries(
            lambda exclude: self.choose_encoder(
                one, item, [*exclude, use.instance.name], use.instance.name
            ),
            self._retries,
            deadline_s=time.monotonic() + self._wait_timeout_s,
        )
        in_turn = self._order == "sequential"
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
                        expected_s = self._servers * self._times.of(item, encoder.name)
                        with (
                            encoder.encoding(expected_s),
                            self._span(one, item, encoder) as span,
                        ):
                            failure = await self._encode(one, item, transfer, encoder, job)
                            if span is not None:
                                end = failure.kind.value if failure else "encoded"
                                set_end(span, end, failed=failure is not None)
                    if failure is None:
                        self._metrics.jobs.labels(encoder.name, "encoded").inc()
                        one.awaited.discard(item.item_uuid)
                        if not one.awaited:
                            use.compute()
                        await requested.wait()
                        if one.decided.is_set():
                            if not one.again:
                                outcome = "encoded" if encoder is first else "retried"
                                self._metrics.items.labels(outcome).inc()
                            return
                        requested.clear()
                        one.awaited.add(item.item_uuid)
                        failure = EncodeFailure(kind=FailureKind.ERROR, reason="gave the item up")
            except WentDownError as error:
                failure = EncodeFailure(kind=FailureKind.LOST, reason=str(error))
            assert failure is not None
            one.exchange.encoded.pop(item.item_uuid, None)
            if resets != self.resets:
                # It has forgotten the item with others, in a reset: that is no failure.
                encoder = self.choose_encoder(one, item, [use.instance.name], use.instance.name)
                continue
            one.selection.note_job(item, encoder, failed=True)
            self._metrics.jobs.labels(encoder.name, failure.kind.value).inc()
            in_turn = self._order != "concurrent"
            logger.warning("transfer %s: encoder %s: %s", job, encoder.name, failure.reason)
            pause_s = tries.note_failure(encoder.name, failure, time.monotonic())
            await asyncio.sleep(pause_s)
            encoder = tries.next_encoder()
        if one.begun:
            return  # It was there before.
        self._metrics.items.labels("local" if self._can_encode else "left_out").inc()
        one.again = tries.describe() if first else "no encode engine is up"
        (one.here if self._can_encode else one.missing).add(item.item_uuid)
        one.decide()

    def _span(
        self, one: OpenRequest, item: FrontItem, encoder: Instance
    ) -> AbstractContextManager[Span | None]:
        if self._spans is None:
            return contextlib.nullcontext()
        tokens = item.feature.mm_position.length
        return self._spans.job("encode", one.core, encoder.name, tokens, item.item_uuid)

    async def _encode(
        self,
        one: OpenRequest,
        item: FrontItem,
        transfer: EncodeTransfer,
        encoder: Instance,
        job: str,
    ) -> EncodeFailure | None:
        """Have one item encoded by one encoder; return why it was not."""
        engine = self._engines.by_name[encoder.name]
        client, begun = engine.client, time.monotonic()
        answer = self.open[job] = asyncio.get_running_loop().create_future()
        trace("encode_job", transfer_id=transfer.transfer_id, encoder=encoder.name)
        try:
            with anyio.move_on_after(self._job_s):
                lora = one.core.lora_request if self._adapts_encoders else None
                await engine.add(_job(one.core, item.feature, transfer, job, lora))
                reason = await answer
        finally:
            del self.open[job]
            if not answer.done() or answer.cancelled():
                with anyio.CancelScope(shield=True):
                    await engine.abort(client, job)
        if not answer.done() or answer.cancelled():
            late = f"did not end the job within {self._job_s:g} s"
            return EncodeFailure(kind=FailureKind.TIMEOUT, reason=late)
        if isinstance(reason, EncodeFailure):
            return reason
        if reason in (FinishReason.ERROR, FinishReason.ABORT):
            return EncodeFailure(kind=FailureKind.ERROR, reason=f"ended the job with {reason}")
        now = time.monotonic()
        # Until it had done the job before, it did not work on this one.
        self._times.observe(item, now - max(begun, encoder.answered_at), encoder.name)
        encoder.answered_at = now
        self._metrics.encode_s.labels(encoder.name).observe(now - begun)
        return None


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


def _job(
    core: EngineCoreRequest, feature: Any, transfer: EncodeTransfer, job: str, lora: Any
) -> EngineCoreRequest:
    """Return the request that has one item encoded and brought to its consumer."""
    place = feature.mm_position
    assert core.prompt_token_ids is not None
    alone = replace(feature, mm_position=PlaceholderRange(0, place.length, place.is_embed))
    return encode_request(
        job,
        core.prompt_token_ids[place.offset : place.offset + place.length],
        alone,
        transfer,
        arrival_time=core.arrival_time,
        lora_request=lora,
        priority=core.priority,
        trace_headers=core.trace_headers,
    )
