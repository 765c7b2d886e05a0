"""One item's way to a PD instance: an encode job, and the failure ladder under it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine
from dataclasses import dataclass

import anyio
import httpx
import msgspec

from epd_portable.log import trace
from epd_portable.router.control import ControlChannels, Inbox
from epd_portable.router.media import MediaItem
from epd_portable.router.metrics import ItemFate, Metrics
from epd_portable.router.pool import Instance, Pool, describe
from epd_portable.router.requests import CHAT_PATH
from epd_portable.router.settings import RouterSettings
from epd_portable.wire.messages import Nack
from epd_portable.wire.params import EncodedItem, EncodeOutcome

logger = logging.getLogger(__name__)

MAX_ENCODERS = 2
"""Encoders tried for one item before the PD instance is told to encode it."""

FIRST_REPEAT_S = 0.05
LONGEST_REPEAT_S = 1.0


class _Answer(msgspec.Struct):
    """What is read of an encode job's answer."""

    ec_transfer_params: EncodeOutcome | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeFailure:
    """Why an item was not encoded.

    Attributes:
        reason: For the log.
        final: Whether another encoder would refuse it too.
        full_for_s: The encoder is well, but full for about this long.
    """

    reason: str
    final: bool = False
    full_for_s: float | None = None


@dataclass(kw_only=True, slots=True)
class Delivery:
    """One item that an encoder has been chosen for.

    Attributes:
        item: The image.
        transfer_id: Its way to the PD request.
        body: Of the encode job; the same for every encoder.
        encoder: Instance that is asked first.
        pd: Instance that waits for the item.
        headers: Of the encode job.
        told: What the encoder says of the item, or why there is none that does; ``None`` if the PD
            instance is asked without waiting for it.
    """

    item: MediaItem
    transfer_id: str
    body: bytes
    encoder: Instance
    pd: Instance
    headers: dict[str, str]
    told: asyncio.Future[EncodedItem | EncodeFailure] | None = None

    @property
    def held_back(self) -> bool:
        """Whether the PD instance has not been asked yet, for want of the item's metadata."""
        return self.told is not None and not self.told.done()

    def tell(self, answer: EncodedItem | EncodeFailure) -> None:
        """Let the PD instance be asked, or not; only the first answer counts."""
        if self.told is not None and not self.told.done():
            self.told.set_result(answer)


class Deliverer:
    """Walks the ladder: an encoder, another encoder, local encoding on the PD instance."""

    def __init__(
        self, settings: RouterSettings, pool: Pool, control: ControlChannels, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._control = control
        self._metrics = metrics

    async def deliver(self, delivery: Delivery, answered: asyncio.Event, inbox: Inbox) -> None:
        """Have one item encoded; return when nothing is left to do for it.

        An encoder that goes down after its job was answered may not have written the item yet, and
        the PD instance may refuse what an encoder announces. Until the PD instance answers these
        count as failures like any other.

        Args:
            delivery: What, by whom and for whom.
            answered: Set when the PD instance has begun its answer, and so needs the item no more.
            inbox: What the PD instance refuses.
        """
        try:
            outcome = await self._try_encoders(delivery, answered, inbox)
        except asyncio.CancelledError:
            self._metrics.item("cancelled")
            raise
        except Exception as error:
            delivery.tell(EncodeFailure(reason=describe(error)))
            raise
        if not isinstance(outcome, EncodeFailure):
            self._metrics.item(outcome)
            return
        if delivery.held_back:
            delivery.tell(outcome)
            return
        self._metrics.item("local")
        self._metrics.rung("local_encode")
        await self._ask_for_local_encoding(delivery, outcome.reason, answered)

    async def _try_encoders(
        self, delivery: Delivery, answered: asyncio.Event, inbox: Inbox
    ) -> ItemFate | EncodeFailure:
        deadline = time.monotonic() + self._settings.wait_timeout_s
        encoder = delivery.encoder
        failed: list[str] = []
        full: dict[str, float] = {}
        while True:
            # Its job may be answered before the item is written: it must not leave before that.
            with encoder.held():
                failure = await self._encode(delivery, encoder)
                if failure is None:
                    refused = inbox.encoder_refused(delivery.transfer_id)
                    failure = await _lost_before(answered, encoder, refused)
            if failure is None:
                return "encoded" if encoder is delivery.encoder else "other_encoder"
            if answered.is_set():
                return "not_needed"
            logger.log(
                logging.WARNING if failure.full_for_s is None else logging.INFO,
                "transfer %s: encoder %s: %s",
                delivery.transfer_id,
                encoder.name,
                failure.reason,
            )
            if failure.full_for_s is not None:
                self._metrics.rung("encoder_full")
                full[encoder.name] = time.monotonic() + failure.full_for_s
            else:
                failed.append(encoder.name)
            if failure.final or len(failed) == MAX_ENCODERS or time.monotonic() >= deadline:
                break
            another = self._pool.encoder(delivery.item.mm_hash, exclude=[*failed, *full])
            if another is None and full:
                # Every encoder that is left is full: ask again when the first has room.
                free_at = min(full.values())
                if free_at >= deadline:
                    break
                with anyio.move_on_after(free_at - time.monotonic()):
                    await answered.wait()
                    return "not_needed"
                full.clear()
                another = self._pool.encoder(delivery.item.mm_hash, exclude=failed)
            if another is None:
                break
            if failure.full_for_s is None:
                self._metrics.rung("other_encoder")
            encoder = another
        return EncodeFailure(reason=_tried(failed, full, failure), final=failure.final)

    async def _ask_for_local_encoding(
        self, delivery: Delivery, reason: str, answered: asyncio.Event
    ) -> None:
        """Repeat the message until the answer begins.

        It may well overtake the request, which the instance has to preprocess first, and an
        instance need not remember a message about a transfer that it does not know yet.
        """
        pause_s = FIRST_REPEAT_S
        while not answered.is_set():
            self._control.encode_failed(delivery.pd.name, delivery.transfer_id, reason)
            with anyio.move_on_after(pause_s):
                await answered.wait()
            pause_s = min(2 * pause_s, LONGEST_REPEAT_S)

    async def _encode(self, delivery: Delivery, encoder: Instance) -> EncodeFailure | None:
        """Run one encode job; return why it failed, or ``None``."""
        started = time.monotonic()
        trace("encode_job", transfer_id=delivery.transfer_id, encoder=encoder.name)
        try:
            # Not asyncio.wait_for: before Python 3.12 it forgets a cancellation that comes together
            # with the answer, and then this job would wait for an answer that never begins.
            with encoder.working(), anyio.fail_after(self._settings.encode_timeout_s):
                response = await encoder.client.post(
                    CHAT_PATH, content=delivery.body, headers=delivery.headers
                )
        except (TimeoutError, httpx.TimeoutException):
            encoder.suspect()
            return EncodeFailure(reason=f"no answer within {time.monotonic() - started:.1f} s")
        except httpx.RequestError as error:
            encoder.mark_down(describe(error))
            return EncodeFailure(reason=describe(error))
        if response.is_success:
            self._metrics.encode_s.labels(encoder.name).observe(time.monotonic() - started)
            delivery.tell(read_answer(response.content))
            return None
        if response.status_code >= 500:
            encoder.suspect()
        full = response.status_code == httpx.codes.TOO_MANY_REQUESTS
        return EncodeFailure(
            reason=f"answered {response.status_code}: {response.text[:200]!r}",
            final=response.is_client_error and not full,
            full_for_s=_retry_after_s(response) if full else None,
        )


def _retry_after_s(response: httpx.Response) -> float:
    """Return how long an encoder asks to wait; it tells milliseconds and, for others, seconds."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = response.headers.get(name, "")
        if text.isdecimal():
            return max(int(text) * unit_s, FIRST_REPEAT_S)
    return LONGEST_REPEAT_S


def _tried(failed: list[str], full: Collection[str], last: EncodeFailure) -> str:
    found = (("tried", failed), ("full", sorted(full)))
    named = [f"encoders {word}: {', '.join(names)}" for word, names in found if names]
    return "; ".join([*named, f"last: {last.reason}"])


def read_answer(body: bytes) -> EncodedItem | EncodeFailure:
    """Return what the answer to an encode job says of its item."""
    try:
        outcome = msgspec.json.decode(body, type=_Answer).ec_transfer_params
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return EncodeFailure(reason=f"its answer cannot be read: {str(error)!r}")
    if outcome is None or not outcome.items:
        return EncodeFailure(reason="its answer says nothing of the item")
    return outcome.items[0]


async def _lost_before(
    answered: asyncio.Event, encoder: Instance, refused: Coroutine[None, None, Nack]
) -> EncodeFailure | None:
    """Return why an encoded item will not be delivered, or ``None`` when the answer begins."""
    down = asyncio.ensure_future(encoder.wait_down())
    refusal = asyncio.ensure_future(refused)
    done = asyncio.ensure_future(answered.wait())
    try:
        await asyncio.wait({down, refusal, done}, return_when=asyncio.FIRST_COMPLETED)
        if answered.is_set():
            return None
        if refusal.done():
            return EncodeFailure(reason=f"refused: {refusal.result().detail!r}")
        return EncodeFailure(reason=f"went down: {encoder.reason}")
    finally:
        for waiting in (down, refusal, done):
            waiting.cancel()
