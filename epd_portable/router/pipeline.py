"""One client request across the instances: encode jobs and the PD request at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping

from epd_portable.config.secret import Secret
from epd_portable.errors import EPDError, PeerLostError, RequestError
from epd_portable.router.control import ControlChannels, Inbox
from epd_portable.router.delivery import Deliverer, Delivery, EncodeFailure
from epd_portable.router.media import MediaItem
from epd_portable.router.metrics import Metrics
from epd_portable.router.pool import Instance, Pool
from epd_portable.router.replies import Reply, refusal, unavailable
from epd_portable.router.requests import Call
from epd_portable.router.sending import RequestSender
from epd_portable.router.settings import RouterSettings
from epd_portable.router.transfers import expected_transfer, new_transfer
from epd_portable.wire.params import (
    EncodedItem,
    PrefillParams,
)

logger = logging.getLogger(__name__)

MAX_PD_ATTEMPTS = 2
"""Times that one request is sent: one that kills its instance must not walk over them all."""

JOB_GRACE_S = 2.0
"""Encode jobs may still be answered for this long after the PD instance has finished."""


class _MediaNeededError(EPDError):
    """A request cannot be answered without its media.

    Attributes:
        refused: An encoder found fault with an item itself.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Pipeline:
    """Sends calls to instances and brings the answers back."""

    def __init__(
        self,
        settings: RouterSettings,
        pool: Pool,
        control: ControlChannels,
        metrics: Metrics,
        secret: Secret,
    ) -> None:
        self._secret = secret
        self._settings = settings
        self._pool = pool
        self._control = control
        self._metrics = metrics
        self._deliverer = Deliverer(settings, pool, control, metrics)
        self._sender = RequestSender(metrics)
        self._late: set[asyncio.Task[None]] = set()
        self._without_metadata: set[str] = set()

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
        for item in call.items:
            self._metrics.modalities.labels(item.modality).inc()
        bare = any(self._goes_bare(item) for item in call.items)
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
                    reply = await stack.enter_async_context(
                        self._attempt(call, pd, headers, bare=bare)
                    )
                except _MediaNeededError as error:
                    self._check_media_help(error)
                    logger.warning("request %s goes with its media: %r", key, str(error))
                    self._metrics.rung("original_media")
                    tried.pop()
                    call, bare = call.renamed(), False
                    continue
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
                f"{i.name}: {i.reason or i.state}" for i in self._pool.of_role("prefill-decode")
            )
            raise unavailable(
                f"no prefill+decode instance can serve ({states or 'none is there'}); try again "
                "later"
            )
        raise unavailable(f"{lost}; try again later")

    @contextlib.asynccontextmanager
    async def _attempt(
        self, call: Call, pd: Instance, headers: dict[str, str], *, bare: bool
    ) -> AsyncIterator[Reply]:
        """Yield the answer of one PD instance.

        Args:
            call: The request.
            pd: Whom to ask.
            headers: To send along.
            bare: Send what the encoders say of the items in place of their media, where the model
                allows it.

        Raises:
            _MediaNeededError: ``bare``, and it cannot be answered so.
        """
        deliveries = self._assign(call, pd, headers, bare=bare)
        answered = asyncio.Event()
        with (
            self._control.expect([d.transfer_id for d in deliveries]) as inbox,
            pd.working(),
            contextlib.ExitStack() as held,
        ):
            for delivery in deliveries:
                held.enter_context(delivery.encoder.held())
            jobs = {
                asyncio.create_task(self._deliverer.deliver(delivery, answered, inbox))
                for delivery in deliveries
            }
            try:
                told = await self._told(deliveries) if bare else None
                body = call.for_pd(self._params(deliveries, told), told)
                async with self._sender.send(call, pd, body, headers) as reply:
                    answered.set()
                    held.close()
                    if reply.status >= 500:
                        pd.suspect()
                        await self._explain(inbox, expected=bool(deliveries), bare=bare)
                    if reply.status >= 400:
                        self._give_up(pd, deliveries, jobs)
                    yield reply
            except BaseException:
                self._give_up(pd, deliveries, jobs)
                await _cancel(jobs)
                raise
            self._let_finish(jobs)

    def _give_up(
        self, pd: Instance, deliveries: list[Delivery], jobs: set[asyncio.Task[None]]
    ) -> None:
        """End the calls to encoders, and tell the PD instance that nobody asks for the items."""
        for job in jobs:
            job.cancel()
        self._control.not_wanted(pd.name, [each.transfer_id for each in deliveries])

    def _goes_bare(self, item: MediaItem) -> bool:
        """Tell whether an item is tried without its media first."""
        if self._settings.media != "metadata":
            return False
        return not self._settings.local_encode or item.modality not in self._without_metadata

    async def _told(self, deliveries: list[Delivery]) -> dict[str, EncodedItem]:
        """Wait until encoders have said what the items are; by the names that these have here.

        Raises:
            _MediaNeededError: Of some item it cannot be had.
        """
        told = {}
        for delivery in deliveries:
            if delivery.told is None:
                continue
            answer = await delivery.told
            if isinstance(answer, EncodeFailure):
                raise _MediaNeededError(answer.reason, refused=answer.final)
            if answer.metadata == {} and answer.modality not in self._without_metadata:
                self._without_metadata.add(answer.modality)
                logger.warning(
                    "items of modality %r cannot be described by metadata with this model and "
                    "version of vLLM: prefill+decode instances get media, as with transfer.media "
                    "concurrent",
                    answer.modality,
                )
            if not answer.metadata:
                raise _MediaNeededError(f"{delivery.encoder.name} knows no metadata of an item")
            told[delivery.item.mm_hash] = answer
        return told

    def _check_media_help(self, error: _MediaNeededError) -> None:
        """Refuse a request whose media would help nobody, as no PD instance holds the encoder."""
        if self._settings.local_encode:
            return
        self._metrics.rung("unavailable")
        if error.refused:
            raise RequestError(str(error), status=400, code="item_refused") from error
        raise unavailable(f"{error}; try again later") from error

    def _assign(
        self, call: Call, pd: Instance, headers: dict[str, str], *, bare: bool
    ) -> list[Delivery]:
        """Choose an encoder for every item; items without one are encoded by the PD instance.

        Raises:
            _MediaNeededError: ``bare``, and an item has no encoder.
        """
        deliveries: list[Delivery] = []
        with contextlib.ExitStack() as reserved:
            for index, item in enumerate(call.items):
                encoder = self._pool.encoder(item.mm_hash)
                goes_bare = bare and self._goes_bare(item)
                if encoder is None and goes_bare:
                    raise _MediaNeededError("no encoder is healthy")
                if encoder is None:
                    self._metrics.item("no_encoder")
                    self._metrics.rung("local_encode")
                    continue
                # Its job is not in flight yet, but the next item's choice must see it.
                reserved.enter_context(encoder.working())
                transfer = new_transfer(item, pd, self._secret)
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
                        told=asyncio.get_running_loop().create_future() if goes_bare else None,
                    )
                )
        return deliveries

    def _params(
        self, deliveries: list[Delivery], told: Mapping[str, EncodedItem] | None
    ) -> PrefillParams | None:
        """Return what the PD instance may expect."""
        if not deliveries:
            return None
        told = told or {}
        transfers = tuple(
            expected_transfer(
                each.item, each.transfer_id, each.encoder, told.get(each.item.mm_hash)
            )
            for each in deliveries
        )
        return PrefillParams(transfers=transfers, reply_to=self._control.identity)

    async def _explain(self, inbox: Inbox, *, expected: bool, bare: bool) -> None:
        """Raise the reason that came over the control channel, if there is one."""
        if expected and not inbox.nacks:
            await inbox.wait(self._settings.nack_grace_s)
        reason = refusal(inbox.nacks)
        if bare and reason is not None and reason.status == 503:
            raise _MediaNeededError(str(reason))
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
