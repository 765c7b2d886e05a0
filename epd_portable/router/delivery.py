"""One item's way to a PD instance: an encode job, and the rungs under it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import anyio
import msgspec

from epd_portable.config.schema import MAX_ENCODERS
from epd_portable.config.secret import Secret
from epd_portable.log import trace
from epd_portable.router.body import CHAT_PATH
from epd_portable.router.control import ControlChannels, Inbox
from epd_portable.router.cut_text import Segments
from epd_portable.router.elastic import EncodeTimes
from epd_portable.router.instances import Fleet, Instance, WentDownError, while_up
from epd_portable.router.ladder import Point, RetryBudget, Trouble, descend
from epd_portable.router.media import MediaItem
from epd_portable.router.metrics import ItemFate, Metrics, Rung
from epd_portable.router.settings import RouterSettings
from epd_portable.router.upstream import Upstream
from epd_portable.router.upstream_connection import Fault, UpstreamError
from epd_portable.wire.params import EncodedItem, EncodeOutcome, EncodeTransfer, ExpectedTransfer

logger = logging.getLogger(__name__)

FIRST_REPEAT_S = 0.05
LONGEST_REPEAT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """One item's way: what, by whom first, and the body of the encode job.

    Attributes:
        item: The item.
        transfer: Its way to the PD instance, whichever encoder brings it.
        encoder: Who is asked first.
        body: Of the job; the same for every encoder.
        bare: Its metadata are waited for, and go to the PD instance in place of its media.
    """

    item: MediaItem
    transfer: EncodeTransfer
    encoder: Instance
    body: Segments
    bare: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeFailure:
    """Why an item was not encoded.

    Attributes:
        trouble: What went wrong.
        reason: For the log.
        full_for_s: The encoder has room again after about this long.
    """

    trouble: Trouble
    reason: str
    full_for_s: float = 0.0


@dataclass(slots=True)
class Attempt:
    """One try of a request, while it runs.

    Attributes:
        pd: Who answers.
        deliveries: Of the items that encoders bring; the others it encodes by itself.
        headers: Of the request.
        inbox: What the PD instance refuses.
        held: Keeps encoders from leaving while it is not answered.
        over: Set when no item is needed any more: the PD instance has begun its answer, or nobody
            waits for one. A job that is cancelled in the moment in which its encoder goes down, or
            in which a time ends, may learn of that only; this it sees in any case.
        told: What encoders say of the items that go without their media, by transfer.
        awaited: Items that the PD instance can do nothing without.
        working: What lasts as long as the try.
    """

    pd: Instance
    deliveries: tuple[Delivery, ...]
    headers: Mapping[str, str]
    inbox: Inbox
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    told: dict[str, asyncio.Future[EncodedItem | EncodeFailure]] = field(default_factory=dict)
    working: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    awaited: int = 0

    def begin(self) -> None:
        """Note that the PD instance has begun its answer."""
        if self.awaited:
            self.has_all()
        self.over.set()
        self.held.close()

    def has_item(self) -> None:
        """Note that an item was encoded, or that the PD instance is to encode it."""
        if self.awaited and not self.over.is_set():
            self.awaited -= 1
            if not self.awaited:
                self.has_all()

    def has_all(self) -> None:
        """Note that nothing keeps the PD instance from computing for the request."""
        self.awaited = 0
        self.working.enter_context(self.pd.computing())

    def tell(self, delivery: Delivery, answer: EncodedItem | EncodeFailure) -> bool:
        """Let the PD instance be asked, or not; tell whether that was waited for."""
        waiting = self.told.get(delivery.transfer.transfer_id)
        if waiting is None or waiting.done():
            return False
        waiting.set_result(answer)
        return True


class Deliverer:
    """Has items encoded, by one encoder or another, or by the PD instance that waits for them.

    Args:
        settings: Of the router.
        instances: Who is there.
        upstream: Connections to them.
        control: Channels to PD instances.
        metrics: Count what happens.
        retries: How often a job may be given to another encoder.

    Attributes:
        times: How long items take encoders.
    """

    def __init__(
        self,
        settings: RouterSettings,
        instances: Fleet,
        upstream: Upstream,
        control: ControlChannels,
        metrics: Metrics,
        retries: RetryBudget,
    ) -> None:
        self._settings = settings
        self._instances = instances
        self._upstream = upstream
        self._control = control
        self._metrics = metrics
        self._retries = retries
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
            self._metrics.item("cancelled")
            raise
        except Exception as error:
            one.tell(delivery, EncodeFailure(trouble=Trouble.ENCODER_FAILED, reason=repr(error)))
            raise
        if not isinstance(outcome, EncodeFailure):
            self._metrics.item(outcome)
            return
        if one.tell(delivery, outcome):
            return
        self._metrics.item("local")
        one.has_item()
        await self._ask_for_local_encoding(delivery, outcome.reason, one)

    async def _try_encoders(
        self, delivery: Delivery, index: int, one: Attempt
    ) -> ItemFate | EncodeFailure:
        """Go down the ladder until the item is encoded, not needed, or the PD instance's to encode.

        Returns:
            What became of it, or why no encoder brings it.
        """
        deadline = time.monotonic() + self._settings.wait_timeout_s
        encoder = delivery.encoder
        failed: list[str] = []
        full: dict[str, float] = {}
        while True:
            # Its job may be answered before the item is written: it must not leave before that.
            with encoder.held():
                failure = await self._encode(delivery, index, encoder, one, deadline)
                if failure is None:
                    failure = await _lost_before_answer(delivery, encoder, one)
            if failure is None:
                return "encoded" if encoder is delivery.encoder else "other_encoder"
            if one.over.is_set():
                return "not_needed"
            is_full = failure.trouble is Trouble.ENCODER_FULL
            logger.log(
                logging.INFO if is_full else logging.WARNING,
                "transfer %s: encoder %s: %s",
                delivery.transfer.transfer_id,
                encoder.name,
                failure.reason,
            )
            if is_full:
                full[encoder.name] = time.monotonic() + failure.full_for_s
            else:
                failed.append(encoder.name)
            another = None
            if len(failed) < MAX_ENCODERS and time.monotonic() < deadline:
                another = self._instances.encoder(delivery.item.mm_hash, exclude=[*failed, *full])
                if another is None and full and min(full.values()) < deadline:
                    another = await self._first_with_room(delivery, one, failed, full)
                    if one.over.is_set():
                        return "not_needed"
                if another is not None and not is_full and not self._retries.take():
                    another = None
            next_rungs: tuple[Rung, ...] = ("encoder_full", "other_encoder") if another else ()
            descend(failure.trouble, Point.ENCODING, next_rungs, self._metrics)
            if another is None or failure.trouble is Trouble.ITEM_REFUSED:
                tried = _tried(failed, full, failure)
                return EncodeFailure(trouble=failure.trouble, reason=tried)
            encoder = another

    async def _first_with_room(
        self, delivery: Delivery, one: Attempt, failed: Collection[str], full: dict[str, float]
    ) -> Instance | None:
        """Every encoder that is left is full: return one when the first has room again."""
        with anyio.move_on_after(min(full.values()) - time.monotonic()):
            await one.over.wait()
        full.clear()
        return self._instances.encoder(delivery.item.mm_hash, exclude=failed)

    async def _encode(
        self, delivery: Delivery, index: int, encoder: Instance, one: Attempt, deadline: float
    ) -> EncodeFailure | None:
        """Run one encode job; return why it failed, or ``None``."""
        started = time.monotonic()
        trace("encode_job", transfer_id=delivery.transfer.transfer_id, encoder=encoder.name)
        headers = {**one.headers, "x-request-id": f"{one.headers['x-request-id']}-item{index}"}
        limit_s = min(self._settings.encode_job_s, deadline - started)
        try:
            with while_up(encoder.working()), encoder.encoding(self.times.of(delivery.item)):
                status, given, body = await self._upstream.ask(
                    "POST",
                    encoder.url + CHAT_PATH,
                    body=delivery.body,
                    headers=headers,
                    connect_s=self._settings.connect_timeout_s,
                    timeout_s=max(limit_s, 0.001),
                )
        except WentDownError as error:
            return EncodeFailure(trouble=Trouble.ENCODER_FAILED, reason=str(error))
        except UpstreamError as error:
            if error.fault is not Fault.SILENT or limit_s >= self._settings.encode_job_s:
                # Who has had less than its time is not to blame.
                encoder.failed(error.fault)
            waited = f" within {time.monotonic() - started:.1f} s"
            reason = f"no answer{waited}" if error.fault is Fault.SILENT else str(error)
            return EncodeFailure(trouble=Trouble.ENCODER_FAILED, reason=reason)
        if status < 300:
            now = time.monotonic()
            # Until it had answered the job before, it did not work on this one.
            self.times.observe(delivery.item, now - max(started, encoder.answered_at))
            self._metrics.encode_s.labels(encoder.name).observe(now - started)
            encoder.answered()
            one.has_item()
            one.tell(delivery, read_item(body))
            return None
        reason = f"answered {status}: {body[:200].decode('utf-8', 'replace')!r}"
        if status == 429:
            encoder.answered()
            return EncodeFailure(
                trouble=Trouble.ENCODER_FULL, reason=reason, full_for_s=_retry_after_s(given)
            )
        if status >= 500:
            encoder.failed("error")
            return EncodeFailure(trouble=Trouble.ENCODER_FAILED, reason=reason)
        encoder.answered()
        return EncodeFailure(trouble=Trouble.ITEM_REFUSED, reason=reason)

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
        mm_hash=item.mm_hash,
        consumer=pd.control,
        modality=item.modality,
        proof=secret.vouch(transfer_id, item.mm_hash, pd.control),
    )


def expected_transfer(
    transfer: EncodeTransfer, encoder: Instance, told: EncodedItem | None
) -> ExpectedTransfer:
    """Return what the PD instance may expect.

    Args:
        transfer: The item's way.
        encoder: Instance that is asked first.
        told: What it says of the item, which then travels without its media and under the
            engine's own name; ``None`` with media.
    """
    return ExpectedTransfer(
        transfer_id=transfer.transfer_id,
        mm_hash=told.mm_hash if told else transfer.mm_hash,
        encoder=encoder.name,
        modality=transfer.modality,
        media=told is None,
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
        return EncodeFailure(trouble=Trouble.NO_METADATA, reason=reason)
    if outcome is None or not outcome.items:
        reason = "its answer says nothing of the item"
        return EncodeFailure(trouble=Trouble.NO_METADATA, reason=reason)
    return outcome.items[0]


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
            reason = f"refused: {refusal.result().detail!r}"
        else:
            reason = f"went down: {encoder.reason}"
        return EncodeFailure(trouble=Trouble.ENCODER_FAILED, reason=reason)
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
