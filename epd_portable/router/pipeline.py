"""One client request across the instances: encode jobs and the PD request at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator

from epd_portable.errors import PeerLostError
from epd_portable.router.control import ControlChannels, Inbox
from epd_portable.router.delivery import Deliverer, Delivery
from epd_portable.router.metrics import Metrics
from epd_portable.router.pool import Instance, Pool
from epd_portable.router.replies import Reply, refusal, unavailable
from epd_portable.router.requests import Call
from epd_portable.router.sending import Sender
from epd_portable.router.settings import RouterSettings
from epd_portable.wire.params import (
    EncodeTransfer,
    ExpectedTransfer,
    PrefillParams,
)

logger = logging.getLogger(__name__)

MAX_PD_ATTEMPTS = 2
"""Times that one request is sent: one that kills its instance must not walk over them all."""

JOB_GRACE_S = 2.0
"""Encode jobs may still be answered for this long after the PD instance has finished."""


class Pipeline:
    """Sends calls to instances and brings the answers back."""

    def __init__(
        self, settings: RouterSettings, pool: Pool, control: ControlChannels, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._control = control
        self._metrics = metrics
        self._deliverer = Deliverer(settings, pool, control, metrics)
        self._sender = Sender(metrics)
        self._late: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Cancel encode jobs that outlived their requests."""
        await _cancel(self._late)

    @contextlib.asynccontextmanager
    async def exchange(self, call: Call, headers: dict[str, str]) -> AsyncIterator[Reply]:
        """Yield the answer to a call once it has begun.

        Leaving the context ends everything that was started for the call; leaving it by an
        exception or cancellation aborts the work at the instances.

        Args:
            call: The request.
            headers: To send along to every instance; ``x-request-id`` is among them.

        Raises:
            RequestError: 413 or 503 by the PD instance's own reason; 503 if none can be reached or
                both tries were lost; 504 if one stays silent.
        """
        tried: list[str] = []
        lost: PeerLostError | None = None
        while len(tried) < MAX_PD_ATTEMPTS:
            key = headers["x-request-id"]
            # After a broken connection to the only instance, that instance may still be well.
            pd = self._pool.prefill_decode(key, exclude=tried) or self._pool.prefill_decode(key)
            if pd is None:
                break
            if tried:
                self._metrics.rung("pd_again")
            tried.append(pd.name)
            async with contextlib.AsyncExitStack() as stack:
                try:
                    reply = await stack.enter_async_context(self._attempt(call, pd, headers))
                except PeerLostError as error:
                    lost = error
                    logger.warning("request %s: %s", key, error)
                    await pd.probe(self._settings.connect_timeout_s)
                    continue
                yield reply
                return
        self._metrics.rung("unavailable")
        if lost is None:
            states = "; ".join(
                f"{i.name}: {i.reason}" for i in self._pool.of_role("prefill-decode")
            )
            raise unavailable(f"no prefill+decode instance is healthy ({states}); try again later")
        raise unavailable(f"{lost}; try again later")

    @contextlib.asynccontextmanager
    async def _attempt(
        self, call: Call, pd: Instance, headers: dict[str, str]
    ) -> AsyncIterator[Reply]:
        deliveries = self._assign(call, pd, headers)
        answered = asyncio.Event()
        with self._control.expect([d.transfer_id for d in deliveries]) as inbox, pd.working():
            jobs = {
                asyncio.create_task(self._deliverer.deliver(delivery, answered))
                for delivery in deliveries
            }
            try:
                body = call.for_pd(self._params(deliveries))
                async with self._sender.send(call, pd, body, headers) as reply:
                    answered.set()
                    if reply.status >= 500:
                        pd.suspect()
                        await self._explain(inbox, expected=bool(deliveries))
                    yield reply
            except BaseException:
                await _cancel(jobs)
                raise
            self._let_finish(jobs)

    def _assign(self, call: Call, pd: Instance, headers: dict[str, str]) -> list[Delivery]:
        """Choose an encoder for every item; items without one are encoded by the PD instance."""
        deliveries: list[Delivery] = []
        with contextlib.ExitStack() as reserved:
            for index, item in enumerate(call.items):
                encoder = self._pool.encoder(item.mm_hash)
                if encoder is None:
                    self._metrics.item("no_encoder")
                    self._metrics.rung("local_encode")
                    continue
                # Its job is not in flight yet, but the next item's choice must see it.
                reserved.enter_context(encoder.working())
                transfer = EncodeTransfer(
                    transfer_id=uuid.uuid4().hex, mm_hash=item.mm_hash, consumer=pd.control
                )
                deliveries.append(
                    Delivery(
                        item=item,
                        transfer_id=transfer.transfer_id,
                        body=call.for_encoder(item, transfer),
                        encoder=encoder,
                        pd=pd,
                        headers={
                            **headers,
                            "x-request-id": f"{headers['x-request-id']}-item{index}",
                        },
                    )
                )
        return deliveries

    def _params(self, deliveries: list[Delivery]) -> PrefillParams | None:
        if not deliveries:
            return None
        transfers = tuple(
            ExpectedTransfer(
                transfer_id=delivery.transfer_id,
                mm_hash=delivery.item.mm_hash,
                encoder=delivery.encoder.name,
            )
            for delivery in deliveries
        )
        return PrefillParams(transfers=transfers, reply_to=self._control.identity)

    async def _explain(self, inbox: Inbox, *, expected: bool) -> None:
        """Raise the reason that came over the control channel, if there is one."""
        if expected and not inbox.nacks:
            await inbox.wait(self._settings.nack_grace_s)
        reason = refusal(inbox.nacks)
        if reason is not None:
            if reason.status == 503:
                self._metrics.rung("unavailable")
            raise reason

    def _let_finish(self, jobs: set[asyncio.Task[None]]) -> None:
        if not jobs:
            return
        task = asyncio.create_task(_finish(jobs))
        self._late.add(task)
        task.add_done_callback(self._late.discard)


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            logger.error("delivery of an item failed", exc_info=result)


async def _finish(jobs: set[asyncio.Task[None]]) -> None:
    try:
        await asyncio.wait(jobs, timeout=JOB_GRACE_S)
    finally:
        await _cancel(jobs)
