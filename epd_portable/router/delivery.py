"""One item's way to a PD instance: an encode job, and its fallbacks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

import anyio
import msgspec

from epd_portable.config.routing import MAX_ENCODERS
from epd_portable.config.secret import Secret
from epd_portable.delivery.elastic import EncodeTimes
from epd_portable.delivery.fallbacks import RequestFailure, RequestPhase, RetryBudget
from epd_portable.delivery.instances import Instance, Use, WentDownError, while_up
from epd_portable.log import trace
from epd_portable.router.client_exchange import ClientExchange
from epd_portable.router.contents.body import CHAT_PATH, Call, size
from epd_portable.router.contents.cut_text import Segments
from epd_portable.router.contents.media import MediaItem
from epd_portable.router.fleet.control import ControlChannels, Inbox
from epd_portable.router.http.upstream import Upstream
from epd_portable.router.http.upstream_connection import UpstreamError
from epd_portable.router.observability.record import Leg, RequestRecord
from epd_portable.router.selector import Selection
from epd_portable.router.settings import RouterSettings
from epd_portable.router.store import StoredItem, StoreLookup
from epd_portable.wire.outcomes import FailureKind, Fallback, ItemResult
from epd_portable.wire.params import EncodedItem, EncodeOutcome, EncodeTransfer, ExpectedTransfer

logger = logging.getLogger(__name__)

FIRST_REPEAT_S = 0.05
LONGEST_REPEAT_S = 1.0
JOB_GRACE_S = 2.0
"""Encode jobs may still be answered for this long after the PD instance has finished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """One item's way: what, by whom first, and the body of the encode job.

    Attributes:
        item: The item.
        transfer: Its way to the PD instance, whichever encoder brings it.
        encoder: Who is asked first; ``None`` if the store has it.
        body: Of the job; the same for every encoder.
        metadata_only: Its metadata are waited for, and go to the PD instance in place of its media.
        stored: Where it is in the store; encoders are asked if that comes to nothing.
    """

    item: MediaItem
    transfer: EncodeTransfer
    encoder: Instance | None
    body: Segments
    metadata_only: bool
    stored: StoredItem | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPlan:
    """Every choice for one try of a request.

    Attributes:
        pd: Who answers.
        deliveries: Of the items that encoders bring; the others it encodes by itself.
        here_s: How long it will take for those that it encodes by choice.
        prefill: Who computes the prompt before, and gets the items; ``None`` for nobody else.
    """

    pd: Instance
    deliveries: tuple[Delivery, ...] = ()
    here_s: float = 0.0
    prefill: RequestPlan | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeFailure:
    """Why an item was not encoded.

    Attributes:
        kind: What went wrong.
        reason: For the log.
        full_for_s: The encoder has room again after about this long.
    """

    kind: FailureKind
    reason: str
    full_for_s: float = 0.0


@dataclass(slots=True)
class Attempt:
    """One try of a request, while it runs.

    Attributes:
        use: Of who answers.
        deliveries: Of the items that encoders bring; the others it encodes by itself.
        headers: Of the request.
        inbox: What the PD instance refuses.
        held: Keeps encoders from leaving while it is not answered.
        over: Set when no item is needed any more: the PD instance has begun its answer, or nobody
            waits for one. A job that is cancelled in the moment in which its encoder goes down, or
            in which a time ends, may learn of that only; this it sees in any case.
        metadata: What encoders say of the items that go without their media, by transfer.
        awaited: Items that the PD instance can do nothing without.
        turn: Held by the encode job that runs, where they run one after the other.
        selection: Who gets what of the request.
        encoded: Is told when no item of it is with an encoder any more; may be told twice.
        record: Of the request.
    """

    use: Use
    deliveries: tuple[Delivery, ...]
    headers: Mapping[str, str]
    inbox: Inbox
    selection: Selection
    encoded: Callable[[], None]
    record: RequestRecord
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    metadata: dict[str, asyncio.Future[EncodedItem | EncodeFailure]] = field(default_factory=dict)
    awaited: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def pd(self) -> Instance:
        """Who answers."""
        return self.use.instance

    def note_answer_began(self) -> None:
        """Note that the PD instance has begun its answer."""
        self.use.compute()
        self.over.set()
        self.held.close()
        self.encoded()

    def has_item(self) -> None:
        """Note that an item was encoded, or that the PD instance is to encode it."""
        self.awaited -= 1
        if not (self.awaited or self.over.is_set()):
            self.use.compute()
            self.encoded()

    def describe(self, delivery: Delivery, answer: EncodedItem | EncodeFailure) -> bool:
        """Take in what an encoder says of an item, or why it says nothing.

        Returns:
            Whether that was waited for.
        """
        waiting = self.metadata.get(delivery.transfer.transfer_id)
        if waiting is None or waiting.done():
            return False
        waiting.set_result(answer)
        return True


class Forwarder(Protocol):
    """Brings requests to PD instances and their answers to clients.

    `epd_portable.router.exchange.Exchange` is one itself.
    """

    def choose(self, selection: Selection, tried: Collection[str]) -> Instance | None:
        """Return the PD instance that should answer a request; ``None`` if there is none.

        Args:
            selection: Of the request.
            tried: Names of instances that must not get it.
        """

    async def forward(self, call: Call, one: Attempt, body: Segments, out: ClientExchange) -> int:
        """Send a request, pass the answer on to its end, and return the answer's status.

        Calls `Attempt.note_answer_began` as soon as the instance has begun to answer.

        Args:
            call: The request.
            one: The instance that answers, and the headers with which the request goes.
            body: Of the request.
            out: Takes the answer.

        Raises:
            RequestFailure: There is no answer, or only a part of it.
            RequestError: The same, and nothing can be done about it.
        """


def silent(pd: Instance, phase: RequestPhase) -> RequestFailure:
    """Return the failure by a PD instance from which nothing came any more."""
    message = f"instance {pd.name} was silent for longer than router.idle_timeout_s"
    return RequestFailure(FailureKind.TIMEOUT, phase, message)


def connection_failure(pd: Instance, error: UpstreamError, phase: RequestPhase) -> RequestFailure:
    """Return what an error of the connection is to the request."""
    pd.failed(error.kind)
    if error.kind is FailureKind.UNAVAILABLE:
        return RequestFailure(error.kind, phase, str(error))
    if error.kind is FailureKind.TIMEOUT:
        return silent(pd, phase)
    # What is no HTTP is as good as no connection.
    kind = error.kind if error.kind is FailureKind.UNREACHABLE else FailureKind.LOST
    return RequestFailure(kind, phase, f"instance {pd.name} was lost: {error}")


class Deliverer:
    """Has items encoded, by one encoder or another, or by the PD instance that waits for them.

    Args:
        settings: Of the router.
        upstream: Connections to instances.
        control: Channels to PD instances.
        retries: How often a job may be given to another encoder.
        store: Hears which entries encoders write.

    Attributes:
        times: How long items take encoders.
    """

    def __init__(
        self,
        settings: RouterSettings,
        upstream: Upstream,
        control: ControlChannels,
        retries: RetryBudget,
        store: StoreLookup,
    ) -> None:
        self._settings = settings
        self._upstream = upstream
        self._control = control
        self._retries = retries
        self._store = store
        self.times = EncodeTimes()

    async def deliver(self, delivery: Delivery, index: int, one: Attempt) -> None:
        """Have one item encoded; return when nothing is left to do for it.

        An encoder that goes down after its job was answered may not have written the item yet, and
        the PD instance may refuse what an encoder announces. Until the PD instance answers these
        count as failures like any other.
        """
        try:
            outcome = await self._try_encoders(delivery, index, one)
        except asyncio.CancelledError:
            one.record.end_item(delivery.item, "cancelled")
            raise
        except Exception as error:
            one.describe(delivery, EncodeFailure(kind=FailureKind.ERROR, reason=repr(error)))
            raise
        if not isinstance(outcome, EncodeFailure):
            one.record.end_item(delivery.item, outcome)
            return
        if one.describe(delivery, outcome):
            return
        one.record.end_item(delivery.item, "local")
        one.has_item()
        await self._ask_for_local_encoding(delivery, outcome.reason, one)

    async def _try_encoders(
        self, delivery: Delivery, index: int, one: Attempt
    ) -> ItemResult | EncodeFailure:
        """Try encoders until the item is encoded, not needed, or the PD instance's to encode.

        Returns:
            What became of it, or why no encoder brings it.
        """
        deadline = time.monotonic() + self._settings.wait_timeout_s
        encoder = delivery.encoder
        if delivery.stored is not None:
            refusal = await _refused_by_store(delivery, delivery.stored, one)
            if not refusal or one.over.is_set():
                return "stored"
            encoder = one.selection.choose_encoder(delivery.item, ())
            _note(one, FailureKind.MISSING, encoder)
            if encoder is None:
                return EncodeFailure(kind=FailureKind.UNAVAILABLE, reason=refusal)
            one.awaited += 1
        assert encoder is not None, "a delivery has an encoder, or an entry of the store"
        failed: list[str] = []
        full: dict[str, float] = {}
        last_full: EncodeFailure | None = None
        while True:
            # Its job may be answered before the item is written: it must not leave before that.
            with encoder.held():
                async with self._turn(one, again=bool(failed or full)):
                    if one.over.is_set():
                        return "not_needed"
                    one.selection.note_encode_job(delivery.item, encoder)
                    failure = await self._encode(delivery, index, encoder, one, deadline)
                if failure is None:
                    failure = await _lost_before_answer(delivery, encoder, one)
            if failure is None:
                first = delivery.encoder in (encoder, None)
                return "encoded" if first else "retried"
            if one.over.is_set():
                return "not_needed"
            one.selection.note_not_encoded(delivery.item, encoder)
            if failure.kind is FailureKind.TIMEOUT and last_full and time.monotonic() >= deadline:
                # Cut off by the item's deadline, not by the encoder, which had been full so far.
                failure = last_full
            is_full = failure.kind is FailureKind.FULL
            logger.log(
                logging.INFO if is_full else logging.WARNING,
                "transfer %s: encoder %s: %s",
                delivery.transfer.transfer_id,
                encoder.name,
                failure.reason,
            )
            if is_full:
                last_full = failure
                full[encoder.name] = time.monotonic() + failure.full_for_s
            else:
                failed.append(encoder.name)
            another = None
            # No other encoder can do more with an item at fault.
            refused = failure.kind is FailureKind.REFUSED
            if not refused and len(failed) < MAX_ENCODERS and time.monotonic() < deadline:
                another = one.selection.choose_encoder(delivery.item, [*failed, *full])
                if another is None and full and min(full.values()) < deadline:
                    another = await self._first_with_room(delivery, one, failed, full)
                    if one.over.is_set():
                        return "not_needed"
                if another is not None and not is_full and not self._retries.spend():
                    another = None
            _note(one, failure.kind, another)
            if another is None:
                tried = _tried(failed, full, failure)
                return EncodeFailure(kind=failure.kind, reason=tried)
            encoder = another

    def _turn(self, one: Attempt, *, again: bool) -> AbstractAsyncContextManager[None]:
        """Return what an encode job runs within: all of them end by the same deadline."""
        order = self._settings.encode_order
        in_turn = order == "sequential" or (again and order == "sequential_fallback")
        return one.turn if in_turn else contextlib.nullcontext()

    async def _first_with_room(
        self, delivery: Delivery, one: Attempt, failed: Collection[str], full: dict[str, float]
    ) -> Instance | None:
        """Every encoder that is left is full: return one when the first has room again."""
        with anyio.move_on_after(min(full.values()) - time.monotonic()):
            await one.over.wait()
        full.clear()
        return one.selection.choose_encoder(delivery.item, failed)

    async def _encode(
        self, delivery: Delivery, index: int, encoder: Instance, one: Attempt, deadline: float
    ) -> EncodeFailure | None:
        """Run one encode job, and note it; return why it failed, or ``None``."""
        job = one.record.job(delivery.item, encoder.name, size(delivery.body))
        end = "cancelled"
        try:
            failure = await self._run(delivery, index, encoder, one, job, deadline)
            end = "encoded" if failure is None else failure.kind.value
            return failure
        finally:
            one.record.end_job(delivery.item, job, end)

    async def _run(
        self,
        delivery: Delivery,
        index: int,
        encoder: Instance,
        one: Attempt,
        job: Leg,
        deadline: float,
    ) -> EncodeFailure | None:
        started = time.monotonic()
        trace("encode_job", transfer_id=delivery.transfer.transfer_id, encoder=encoder.name)
        headers = {**one.headers, "x-request-id": f"{one.headers['x-request-id']}-item{index}"}
        if job.traceparent:
            headers["traceparent"] = job.traceparent
        limit_s = min(self._settings.encode_job_s, deadline - started)
        try:
            with (
                while_up(encoder.working(delivery.item.item_uuid)),
                encoder.encoding(self.times.of(delivery.item)),
            ):
                status, given, body = await self._upstream.ask(
                    "POST",
                    encoder.url + CHAT_PATH,
                    body=delivery.body,
                    headers=headers,
                    connect_s=self._settings.connect_timeout_s,
                    timeout_s=max(limit_s, 0.001),
                )
        except WentDownError as error:
            return EncodeFailure(kind=FailureKind.LOST, reason=str(error))
        except UpstreamError as error:
            if error.kind is not FailureKind.TIMEOUT or limit_s >= self._settings.encode_job_s:
                # One that had less than its time is not to blame.
                encoder.failed(error.kind)
            if error.kind is not FailureKind.TIMEOUT:
                return EncodeFailure(kind=FailureKind.LOST, reason=str(error))
            reason = f"no answer within {time.monotonic() - started:.1f} s"
            return EncodeFailure(kind=FailureKind.TIMEOUT, reason=reason)
        if status < 300:
            now = time.monotonic()
            # Until it had answered the job before, it did not work on this one.
            self.times.observe(delivery.item, now - max(started, encoder.answered_at))
            encoder.answered()
            self._store.hear(encoder.name, body)
            one.has_item()
            one.describe(delivery, read_item(body))
            return None
        reason = f"answered {status}: {body[:200].decode('utf-8', 'replace')!r}"
        if status == 429:
            encoder.answered()
            return EncodeFailure(
                kind=FailureKind.FULL,
                reason=reason,
                full_for_s=_retry_after_s(given),
            )
        if status >= 500:
            encoder.failed(FailureKind.ERROR)
            return EncodeFailure(kind=FailureKind.ERROR, reason=reason)
        encoder.answered()
        return EncodeFailure(kind=FailureKind.REFUSED, reason=reason)

    async def _ask_for_local_encoding(self, delivery: Delivery, reason: str, one: Attempt) -> None:
        """Repeat the message until the answer begins.

        It may well overtake the request, which the instance has to preprocess first, and an
        instance need not remember a message about a transfer that it does not know yet.
        """
        pause_s = FIRST_REPEAT_S
        while not one.over.is_set():
            self._control.encode_failed(one.pd.name, delivery.transfer.transfer_id, reason)
            with anyio.move_on_after(pause_s):
                await one.over.wait()
            pause_s = min(2 * pause_s, LONGEST_REPEAT_S)


def new_transfer(item: MediaItem, pd: Instance, secret: Secret) -> EncodeTransfer:
    """Return a way of its own for an item, for whichever instance encodes it, with its proof."""
    transfer_id = uuid.uuid4().hex
    return EncodeTransfer(
        transfer_id=transfer_id,
        item_uuid=item.item_uuid,
        consumer=pd.control,
        modality=item.modality,
        proof=secret.sign_transfer(transfer_id, item.item_uuid, pd.control),
    )


def from_store(
    call: Call,
    stored: Mapping[str, StoredItem],
    pd: Instance,
    secret: Secret,
    as_metadata: Callable[[MediaItem], bool],
) -> dict[str, Delivery]:
    """Return how those of a call's items come to an instance that the store has, by their names."""
    found = {}
    for item in call.items:
        one, metadata_only = stored.get(item.item_uuid), as_metadata(item)
        if one is not None and one.serves(metadata_only=metadata_only):
            transfer = new_transfer(item, pd, secret)
            job = call.for_encoder(item, transfer)
            found[item.item_uuid] = Delivery(
                item=item,
                transfer=transfer,
                encoder=None,
                body=job,
                metadata_only=metadata_only,
                stored=one,
            )
    return found


def expected_transfer(
    transfer: EncodeTransfer,
    encoder: Instance | None,
    metadata: EncodedItem | None,
    store: str = "",
) -> ExpectedTransfer:
    """Return what the PD instance may expect.

    Args:
        transfer: The item's way.
        encoder: Instance that is asked first.
        metadata: What it says of the item, which then travels without its media and under the
            engine's own name; ``None`` with media.
        store: Key of its entry, if the store has it.
    """
    return ExpectedTransfer(
        transfer_id=transfer.transfer_id,
        item_uuid=metadata.mm_hash if metadata else transfer.item_uuid,
        encoder=encoder.name if encoder else "",
        modality=transfer.modality,
        media=metadata is None,
        store=store,
    )


class _EncodeAnswer(msgspec.Struct):
    """What is read of an encode job's answer."""

    ec_transfer_params: EncodeOutcome | None = None


def read_item(body: bytes) -> EncodedItem | EncodeFailure:
    """Return what the answer to an encode job says of its item."""
    try:
        outcome = msgspec.json.decode(body, type=_EncodeAnswer).ec_transfer_params
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = f"its answer cannot be read: {str(error)!r}"
        return EncodeFailure(kind=FailureKind.MISSING, reason=reason)
    if outcome is None or not outcome.items:
        reason = "its answer says nothing of the item"
        return EncodeFailure(kind=FailureKind.MISSING, reason=reason)
    return outcome.items[0]


def _note(one: Attempt, kind: FailureKind, another: Instance | None) -> None:
    """Note what is done about an item that was not encoded."""
    possible: tuple[Fallback, ...] = ("retried",) if another else ()
    one.record.fall_back(RequestPhase.ENCODE, kind, possible)


async def _refused_by_store(delivery: Delivery, stored: StoredItem, one: Attempt) -> str:
    """Return why the PD instance cannot load an item; empty when the answer begins."""
    one.has_item()
    one.describe(delivery, stored.metadata)
    refusal = asyncio.ensure_future(one.inbox.encoder_refused(delivery.transfer.transfer_id))
    done = asyncio.ensure_future(one.over.wait())
    try:
        await asyncio.wait({refusal, done}, return_when=asyncio.FIRST_COMPLETED)
        if not refusal.done():
            return ""
        stored.usable = False
        return refusal.result().detail or "the store did not bring it"
    finally:
        refusal.cancel()
        done.cancel()


async def _lost_before_answer(
    delivery: Delivery, encoder: Instance, one: Attempt
) -> EncodeFailure | None:
    """Return why an encoded item will not be delivered, or ``None`` when the answer begins."""
    if one.over.is_set():
        return None
    down = asyncio.ensure_future(encoder.wait_down())
    refusal = asyncio.ensure_future(one.inbox.encoder_refused(delivery.transfer.transfer_id))
    done = asyncio.ensure_future(one.over.wait())
    try:
        await asyncio.wait({down, refusal, done}, return_when=asyncio.FIRST_COMPLETED)
        if one.over.is_set():
            return None
        if refusal.done():
            detail = refusal.result().detail
            return EncodeFailure(kind=FailureKind.ERROR, reason=f"refused: {detail!r}")
        return EncodeFailure(kind=FailureKind.LOST, reason=f"went down: {encoder.reason}")
    finally:
        for waiting in (down, refusal, done):
            waiting.cancel()


def _tried(failed: Collection[str], full: Collection[str], last: EncodeFailure) -> str:
    found = (("tried", failed), ("full", sorted(full)))
    named = [f"encoders {word}: {', '.join(names)}" for word, names in found if names]
    return "; ".join([*named, f"last: {last.reason}"])


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Return how long an encoder asks to wait; it tells milliseconds and, for others, seconds."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name, "")
        if text.isdecimal():
            return max(int(text) * unit_s, FIRST_REPEAT_S)
    return LONGEST_REPEAT_S


def end_soon(jobs: Iterable[asyncio.Task[None]]) -> None:
    """Cancel jobs whose encoders do not answer soon, though nobody waits for them."""
    waiting = [job for job in jobs if not job.done()]
    if not waiting:
        return
    timer = asyncio.get_running_loop().call_later(
        JOB_GRACE_S, lambda: [job.cancel() for job in waiting]
    )
    left = len(waiting)

    def ended(_: asyncio.Task[None]) -> None:
        nonlocal left
        left -= 1
        if not left:
            timer.cancel()

    for job in waiting:
        job.add_done_callback(ended)
