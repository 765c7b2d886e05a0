"""One item's way to a PD instance: an encode job, and the failure ladder under it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

import httpx

from epd_portable.log import trace
from epd_portable.router.control import ControlChannels
from epd_portable.router.media import MediaItem
from epd_portable.router.metrics import ItemFate, Metrics
from epd_portable.router.pool import Instance, Pool, describe
from epd_portable.router.requests import CHAT_PATH
from epd_portable.router.settings import RouterSettings

logger = logging.getLogger(__name__)

MAX_ENCODERS = 2
"""Encoders tried for one item before the PD instance is told to encode it."""

FIRST_REPEAT_S = 0.05
LONGEST_REPEAT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    """Why an encode job did not succeed.

    Attributes:
        reason: For the log.
        final: Whether another encoder would refuse it too.
    """

    reason: str
    final: bool = False


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
    """

    item: MediaItem
    transfer_id: str
    body: bytes
    encoder: Instance
    pd: Instance
    headers: dict[str, str]


class Deliverer:
    """Walks the ladder: an encoder, another encoder, local encoding on the PD instance."""

    def __init__(
        self, settings: RouterSettings, pool: Pool, control: ControlChannels, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._control = control
        self._metrics = metrics

    async def deliver(self, delivery: Delivery, answered: asyncio.Event) -> None:
        """Have one item encoded; return when nothing is left to do for it.

        An encoder that goes down after its job was answered may not have written the item yet, so
        until the PD instance answers this counts as a failure like any other.

        Args:
            delivery: What, by whom and for whom.
            answered: Set when the PD instance has begun its answer, and so needs the item no more.
        """
        try:
            outcome = await self._try_encoders(delivery, answered)
        except asyncio.CancelledError:
            self._metrics.item("cancelled")
            raise
        if not isinstance(outcome, _Failure):
            self._metrics.item(outcome)
            return
        self._metrics.item("local")
        self._metrics.rung("local_encode")
        await self._ask_for_local_encoding(delivery, outcome.reason, answered)

    async def _try_encoders(
        self, delivery: Delivery, answered: asyncio.Event
    ) -> ItemFate | _Failure:
        deadline = time.monotonic() + self._settings.wait_timeout_s
        encoder = delivery.encoder
        tried: list[str] = []
        while True:
            failure = await self._encode(delivery, encoder)
            if failure is None and not await _down_before(encoder, answered):
                return "other_encoder" if tried else "encoded"
            if answered.is_set():
                return "not_needed"
            failure = failure or _Failure(reason=f"went down: {encoder.reason}")
            tried.append(encoder.name)
            logger.warning(
                "transfer %s: encoder %s: %s", delivery.transfer_id, encoder.name, failure.reason
            )
            if failure.final or len(tried) == MAX_ENCODERS or time.monotonic() >= deadline:
                break
            another = self._pool.encoder(delivery.item.mm_hash, exclude=tried)
            if another is None:
                break
            encoder = another
            self._metrics.rung("other_encoder")
        return _Failure(reason=f"encoders tried: {', '.join(tried)}; last: {failure.reason}")

    async def _ask_for_local_encoding(
        self, delivery: Delivery, reason: str, answered: asyncio.Event
    ) -> None:
        """Repeat the message until the answer begins.

        It may well overtake the request, which the instance has to preprocess first, and an
        instance need not remember a message about a transfer that it does not know yet.
        """
        pause_s = FIRST_REPEAT_S
        while not answered.is_set():
            await self._control.encode_failed(delivery.pd.name, delivery.transfer_id, reason)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(answered.wait(), pause_s)
            pause_s = min(2 * pause_s, LONGEST_REPEAT_S)

    async def _encode(self, delivery: Delivery, encoder: Instance) -> _Failure | None:
        """Run one encode job; return why it failed, or ``None``."""
        started = time.monotonic()
        trace("encode_job", transfer_id=delivery.transfer_id, encoder=encoder.name)
        request = encoder.client.post(CHAT_PATH, content=delivery.body, headers=delivery.headers)
        try:
            with encoder.working():
                response = await asyncio.wait_for(request, self._settings.encode_timeout_s)
        except (asyncio.TimeoutError, httpx.TimeoutException):
            encoder.suspect()
            return _Failure(reason=f"no answer within {time.monotonic() - started:.1f} s")
        except httpx.RequestError as error:
            encoder.mark_down(describe(error))
            return _Failure(reason=describe(error))
        if response.is_success:
            self._metrics.encode_s.labels(encoder.name).observe(time.monotonic() - started)
            return None
        if response.status_code >= 500:
            encoder.suspect()
        refused_for_good = 400 <= response.status_code < 500 and response.status_code != 429
        return _Failure(
            reason=f"answered {response.status_code}: {response.text[:200]}", final=refused_for_good
        )


async def _down_before(encoder: Instance, answered: asyncio.Event) -> bool:
    """Return whether the encoder goes down before the answer begins."""
    down = asyncio.ensure_future(encoder.wait_down())
    done = asyncio.ensure_future(answered.wait())
    try:
        await asyncio.wait({down, done}, return_when=asyncio.FIRST_COMPLETED)
        return not answered.is_set()
    finally:
        down.cancel()
        done.cancel()
