"""Encode jobs: one item's way to a PD instance, over HTTP to one encoder or another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec

from epd_portable.config.roles import ENCODES
from epd_portable.connector.stores.lookup import StoredItem
from epd_portable.log import trace
from epd_portable.placement.assignment import EncodeFailure, EncodeTimes, EncodeTries
from epd_portable.placement.fallbacks import RequestPhase, RetryBudget
from epd_portable.placement.instances import Instance, Use, WentDownError, while_up
from epd_portable.router.client_exchange import ClientExchange
from epd_portable.router.contents.body import CHAT_PATH, Call, size
from epd_portable.router.contents.cut_text import Segments, decode_if_valid
from epd_portable.router.contents.media import MediaItem
from epd_portable.router.fleet.control import ControlChannels, Inbox
from epd_portable.router.http.upstream import Upstream, UpstreamError
from epd_portable.router.observability.record import Leg
from epd_portable.router.selector import Selection
from epd_portable.router.settings import RouterSettings
from epd_portable.router.stored import LearningLookup
from epd_portable.wire.outcomes import FailureKind, Fallback, ItemResult
from epd_portable.wire.params import EncodedItem, EncodeOutcome, EncodeTransfer

logger = logging.getLogger(__name__)

FIRST_REPEAT_S = 0.05
LONGEST_REPEAT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """One item's way to the PD instance.

    Attributes:
        index: Its place among those of the request.
        transfer: The same, whichever encoder brings it.
        encoder: Who is asked first; ``None`` if the store has it.
        stored: Its entry in the store; encoders are asked if that comes to nothing.
        metadata: What an encoder says of it, which goes to the PD instance in place of its media;
            ``None`` with media.
    """

    index: int
    item: MediaItem
    transfer: EncodeTransfer
    encoder: Instance | None
    body: Segments
    stored: StoredItem | None = None
    metadata: asyncio.Future[EncodedItem | EncodeFailure] | None = None

    def set_metadata(self, answer: EncodedItem | EncodeFailure) -> bool:
        """Take in what the item is, or why that is not known; return whether it was waited for."""
        if self.metadata is None or self.metadata.done():
            return False
        self.metadata.set_result(answer)
        return True


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One try of a request at one instance, while it runs.

    Attributes:
        call: What the instance is asked.
        out: The client, and what is noted of its request.
        deliveries: Of the items that the instance does not encode by itself.
        headers: Of the request to the instance.
        held: What is counted, and who must not leave, until the answer begins.
        over: Set when no item is needed any more: the PD instance has begun its answer, or none
            is waited for. A job that is cancelled in the moment in which its encoder goes down, or
            in which a time ends, may learn of that only; this it sees in any case.
        awaited: Items that the PD instance can do nothing without.
        turn: Held by the encode job that runs, where they run one after the other.
    """

    call: Call
    out: ClientExchange
    use: Use
    deliveries: tuple[Delivery, ...]
    headers: Mapping[str, str]
    inbox: Inbox
    selection: Selection
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    awaited: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def pd(self) -> Instance:
        """Who answers."""
        return self.use.instance

    def note_answer_began(self) -> None:
        """Let go of what only an answer that has not begun needs."""
        self.use.compute()
        self.over.set()
        self.held.close()
        self.out.encoded()

    def note_item_ready(self) -> None:
        """Count an item that was encoded, or that the PD instance is to encode."""
        self.awaited -= 1
        if not (self.awaited or self.over.is_set()):
            self.use.compute()
            self.out.encoded()

    def note_fallback(self, kind: FailureKind, another: Instance | None) -> None:
        """Note what is done about an item that was not encoded."""
        possible: tuple[Fallback, ...] = ("retried",) if another else ()
        self.out.record.fall_back(RequestPhase.ENCODE, kind, possible)


@dataclass(slots=True)
class EncodeJobs:
    """Has items encoded, by one encoder or another, or by the PD instance that waits for them.

    ``store`` learns which entries encoders write.
    """

    settings: RouterSettings
    upstream: Upstream
    control: ControlChannels
    retries: RetryBudget
    store: LearningLookup | None
    times: EncodeTimes = field(default_factory=EncodeTimes, init=False)
    _job_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._job_s = self.settings.encode_job_s

    async def deliver(self, delivery: Delivery, attempt: Attempt) -> None:
        """Have one item encoded; return when nothing is left to do for it.

        An encoder that goes down after its job was answered may not have written the item yet, and
        the PD instance may refuse what an encoder announces. Until the PD instance answers these
        count as failures like any other.
        """
        item = delivery.item
        try:
            outcome = await self._bring(delivery, attempt)
        except asyncio.CancelledError:
            attempt.out.record.end_item(item, "cancelled")
            raise
        except Exception as error:
            problem = EncodeFailure(kind=FailureKind.ERROR, reason=repr(error))
            delivery.set_metadata(problem)
            raise
        if not isinstance(outcome, EncodeFailure):
            attempt.out.record.end_item(item, outcome)
        elif not delivery.set_metadata(outcome):
            attempt.out.record.end_item(item, "local")
            attempt.note_item_ready()
            await self._ask_for_local_encoding(delivery, outcome.reason, attempt)

    async def _bring(self, delivery: Delivery, attempt: Attempt) -> ItemResult | EncodeFailure:
        """Try the store and encoders; return what became of the item, or why none brings it."""
        deadline_s = time.monotonic() + self.settings.wait_timeout_s
        encoder = delivery.encoder

        def choose(exclude: Collection[str]) -> Instance | None:
            # What the PD instance encodes itself is no job.
            return attempt.selection.choose_encoder(delivery.item, [*exclude, attempt.pd.name])

        if delivery.stored is not None:
            attempt.note_item_ready()
            delivery.set_metadata(delivery.stored.metadata)
            refusal = await _lost_before_answer(delivery, None, attempt)
            if refusal is None:
                return "stored"
            delivery.stored.usable = False
            encoder = choose(())
            attempt.note_fallback(FailureKind.MISSING, encoder)
            if encoder is None:
                return refusal
            attempt.awaited += 1
        assert encoder is not None, "a delivery has an encoder, or an entry of the store"
        tries = EncodeTries(choose, self.retries, deadline_s=deadline_s)
        # All that run within it end by the same deadline.
        in_turn = self.settings.encode_order == "sequential"
        while True:
            # Its job may be answered before the item is written: it must not leave before that.
            with encoder.held():
                async with attempt.turn if in_turn else contextlib.nullcontext():
                    if attempt.over.is_set():
                        return "not_needed"
                    failure = await self._encode(delivery, encoder, attempt, deadline_s)
                if failure is None:
                    failure = await _lost_before_answer(delivery, encoder, attempt)
                    attempt.awaited += failure is not None
            if failure is None:
                return "encoded" if delivery.encoder in (encoder, None) else "retried"
            if attempt.over.is_set():
                return "not_needed"
            attempt.selection.note_encode_job(delivery.item, encoder, failed=True)
            pause_s = tries.note_failure(encoder.name, failure, time.monotonic())
            assert tries.failure is not None
            logger.log(
                logging.INFO if tries.failure.kind is FailureKind.FULL else logging.WARNING,
                "transfer %s: encoder %s: %s",
                delivery.transfer.transfer_id,
                encoder.name,
                tries.failure.reason,
            )
            # An encoder itself, which has the media, begins before another one has room.
            here = pause_s > 0 and attempt.pd.role in ENCODES and delivery.metadata is None
            if pause_s and not here:
                with anyio.move_on_after(pause_s):
                    await attempt.over.wait()
                if attempt.over.is_set():
                    return "not_needed"
            another = None if here else tries.next_encoder()
            attempt.note_fallback(tries.failure.kind, another)
            if another is None:
                return EncodeFailure(kind=tries.failure.kind, reason=tries.describe())
            encoder, in_turn = another, self.settings.encode_order != "concurrent"

    async def _encode(
        self, delivery: Delivery, encoder: Instance, attempt: Attempt, deadline_s: float
    ) -> EncodeFailure | None:
        """Run one encode job, and note it; return why it failed, or ``None``."""
        attempt.selection.note_encode_job(delivery.item, encoder)
        job = attempt.out.record.job(delivery.item, encoder.name, size(delivery.body))
        end = "cancelled"
        try:
            failure = await self._ask(delivery, encoder, attempt, job, deadline_s)
            end = "encoded" if failure is None else failure.kind.value
            return failure
        finally:
            attempt.out.record.end_job(delivery.item, job, end)

    async def _ask(
        self, delivery: Delivery, encoder: Instance, attempt: Attempt, job: Leg, deadline_s: float
    ) -> EncodeFailure | None:
        item = delivery.item
        trace("encode_job", transfer_id=delivery.transfer.transfer_id, encoder=encoder.name)
        request_id = attempt.headers["x-request-id"]
        headers = {
            **job.headers(attempt.headers),
            "x-request-id": f"{request_id}-item{delivery.index}",
        }
        started_s = time.monotonic()
        limit_s = min(self._job_s, deadline_s - started_s)
        try:
            with while_up(encoder.working(item.item_uuid)), encoder.encoding(self.times.of(item)):
                status, given, body = await self.upstream.fetch(
                    "POST",
                    encoder.url + CHAT_PATH,
                    body=delivery.body,
                    headers=headers,
                    connect_s=self.settings.connect_timeout_s,
                    timeout_s=max(limit_s, 0.001),
                )
        except WentDownError as error:
            return EncodeFailure(kind=FailureKind.LOST, reason=str(error))
        except UpstreamError as error:
            is_late = error.kind is FailureKind.TIMEOUT
            if not is_late or limit_s >= self._job_s:
                # One that had less than its time is not to blame.
                encoder.failed(error.kind)
            late = f"no answer within {time.monotonic() - started_s:.1f} s"
            return EncodeFailure(kind=error.kind, reason=late if is_late else str(error))
        if status >= 500:
            encoder.failed(FailureKind.ERROR)
            return _answered(FailureKind.ERROR, status, body)
        if status < 300:
            # Until it had answered the job before, it did not work on this one.
            self.times.observe(item, time.monotonic() - max(started_s, encoder.answered_at))
        encoder.answered()
        if status == 429:
            return _answered(FailureKind.FULL, status, body, full_for_s=_retry_after_s(given))
        if status >= 300:
            return _answered(FailureKind.REFUSED, status, body)
        outcome = read_outcome(body)
        if self.store is not None and outcome is not None:
            self.store.note_namespace(encoder.name, outcome.namespace)
        attempt.note_item_ready()
        delivery.set_metadata(item_of(outcome))
        return None

    async def _ask_for_local_encoding(
        self, delivery: Delivery, reason: str, attempt: Attempt
    ) -> None:
        """Repeat the message until the answer begins.

        It may well overtake the request, which the instance has to preprocess first, and an
        instance need not remember a message about a transfer that it does not know yet.
        """
        pause_s = FIRST_REPEAT_S
        while not attempt.over.is_set():
            self.control.encode_failed(attempt.pd.name, delivery.transfer.transfer_id, reason)
            with anyio.move_on_after(pause_s):
                await attempt.over.wait()
            pause_s = min(2 * pause_s, LONGEST_REPEAT_S)


class _EncodeAnswer(msgspec.Struct):
    ec_transfer_params: EncodeOutcome | None = None


def read_outcome(body: bytes) -> EncodeOutcome | None:
    """Return what the answer to an encode job says; ``None`` if that cannot be read."""
    answer = decode_if_valid(body, _EncodeAnswer)
    return answer.ec_transfer_params if answer else None


def item_of(outcome: EncodeOutcome | None) -> EncodedItem | EncodeFailure:
    """Return what the answer to an encode job says of its only item."""
    if outcome is None or not outcome.items:
        reason = "its answer says nothing of the item, or cannot be read"
        return EncodeFailure(kind=FailureKind.MISSING, reason=reason)
    return outcome.items[0]


async def _lost_before_answer(
    delivery: Delivery, encoder: Instance | None, attempt: Attempt
) -> EncodeFailure | None:
    """Return why an encoded item will not arrive, or ``None`` when the answer begins.

    Without ``encoder`` the PD instance loads it from the store.
    """
    if attempt.over.is_set():
        return None
    transfer_id = delivery.transfer.transfer_id
    refusal = asyncio.ensure_future(attempt.inbox.encoder_refused(transfer_id))
    waits: set[asyncio.Future[Any]] = {refusal, asyncio.ensure_future(attempt.over.wait())}
    if encoder is not None:
        waits.add(asyncio.ensure_future(encoder.wait_down()))
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if attempt.over.is_set():
            return None
        if refusal.done():
            kind = FailureKind.ERROR if encoder else FailureKind.MISSING
            return EncodeFailure(kind=kind, reason=f"refused: {refusal.result().detail!r}")
        assert encoder is not None
        return EncodeFailure(kind=FailureKind.LOST, reason=f"went down: {encoder.reason}")
    finally:
        for wait in waits:
            wait.cancel()


def _answered(
    kind: FailureKind, status: int, body: bytes, *, full_for_s: float = 0.0
) -> EncodeFailure:
    reason = f"answered {status}: {body[:200].decode('utf-8', 'replace')!r}"
    return EncodeFailure(kind=kind, reason=reason, full_for_s=full_for_s)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Return how long an encoder asks to wait; it tells milliseconds and, for others, seconds."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name, "")
        if text.isdecimal():
            return max(int(text) * unit_s, FIRST_REPEAT_S)
    return LONGEST_REPEAT_S
