"""One client request across the instances: encode jobs and the PD request at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Iterator

import httpx
import msgspec

from epd_portable.errors import PeerLostError, RequestError
from epd_portable.log import trace
from epd_portable.router.control import ControlChannels, Inbox
from epd_portable.router.delivery import Deliverer, Delivery
from epd_portable.router.metrics import Metrics
from epd_portable.router.pool import Instance, Pool, describe
from epd_portable.router.replies import Reply, error_event, refusal, unavailable
from epd_portable.router.requests import Call
from epd_portable.router.settings import RouterSettings
from epd_portable.wire.params import (
    EncodeTransfer,
    ExpectedTransfer,
    PrefillOutcome,
    PrefillParams,
)

logger = logging.getLogger(__name__)

MAX_PD_ATTEMPTS = 2
"""PD instances tried for one request: one that kills its instance must not walk over them all."""

JOB_GRACE_S = 2.0
"""Encode jobs may still be answered for this long after the PD instance has finished."""

_ERROR_EVENT = b'data: {"error"'
_PASSED_ON = ("content-type", "retry-after")


class _Outcome(msgspec.Struct):
    """What is read of a complete answer."""

    ec_transfer_params: PrefillOutcome | None = None


class _EngineError(msgspec.Struct):
    code: int = 500


class _ErrorEvent(msgspec.Struct):
    error: _EngineError


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
            RequestError: 413 or 503 by the PD instance's own reason; 503 if no PD instance can be
                reached; 504 if it stays silent.
        """
        tried: list[str] = []
        lost: PeerLostError | None = None
        while len(tried) < MAX_PD_ATTEMPTS:
            pd = self._pool.prefill_decode(headers["x-request-id"], exclude=tried)
            if pd is None:
                break
            if tried:
                self._metrics.rung("other_pd")
            tried.append(pd.name)
            async with contextlib.AsyncExitStack() as stack:
                try:
                    reply = await stack.enter_async_context(self._attempt(call, pd, headers))
                except PeerLostError as error:
                    lost = error
                    logger.warning("request %s: %s", headers["x-request-id"], error)
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
                async with self._send(call, pd, body, headers) as response:
                    reply = await self._begin(call, pd, response)
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

    @contextlib.asynccontextmanager
    async def _send(
        self, call: Call, pd: Instance, body: bytes, headers: dict[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """Yield a PD instance's response; its body is not read yet.

        Raises:
            PeerLostError: It cannot be reached.
            RequestError: 504; it stays silent.
        """
        trace("pd_request", request_id=headers["x-request-id"], instance=pd.name)
        request = pd.client.build_request("POST", call.path, content=body, headers=headers)
        with self._translated(pd):
            response = await pd.client.send(request, stream=True)
        try:
            yield response
        finally:
            await response.aclose()

    async def _begin(self, call: Call, pd: Instance, response: httpx.Response) -> Reply:
        """Return a reply whose first piece has arrived."""
        headers = {name: response.headers[name] for name in _PASSED_ON if name in response.headers}
        if not (call.stream and response.is_success):
            with self._translated(pd):
                body = await response.aread()
            self._count_sources(body)
            return Reply(status=response.status_code, headers=headers, body=body)
        pieces = response.aiter_raw()
        first = b""
        with self._translated(pd):
            async for piece in pieces:
                first += piece
                # An error that comes first can still become the status of the answer.
                if not first.startswith(_ERROR_EVENT[: len(first)]) or b"\n\n" in first:
                    break
        if first.startswith(_ERROR_EVENT):
            return _failed_stream(first)
        rest = self._relay(pd, pieces)
        return Reply(status=response.status_code, headers=headers, body=first, rest=rest)

    async def _relay(self, pd: Instance, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for piece in pieces:
                yield piece
        except httpx.TransportError as error:
            pd.suspect()
            logger.warning("instance %s lost within an answer: %s", pd.name, describe(error))
            yield error_event(
                f"instance {pd.name} was lost within this answer ({describe(error)}): it is "
                "incomplete; send the request again",
                status=502,
                code="instance_lost",
            )

    async def _explain(self, inbox: Inbox, *, expected: bool) -> None:
        """Raise the reason that came over the control channel, if there is one."""
        if expected and refusal(inbox.nacks) is None:
            await inbox.wait(self._settings.nack_grace_s)
        reason = refusal(inbox.nacks)
        if reason is not None:
            if reason.status == 503:
                self._metrics.rung("unavailable")
            raise reason

    def _count_sources(self, body: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            outcome = msgspec.json.decode(body, type=_Outcome).ec_transfer_params
            for item in outcome.items if outcome is not None else ():
                self._metrics.sources.labels(item.source, item.path).inc()

    def _let_finish(self, jobs: set[asyncio.Task[None]]) -> None:
        if not jobs:
            return
        task = asyncio.create_task(_finish(jobs))
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    @contextlib.contextmanager
    def _translated(self, pd: Instance) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            pd.suspect()
            raise PeerLostError(f"instance {pd.name} does not accept connections") from error
        except httpx.TimeoutException as error:
            pd.suspect()
            raise RequestError(
                f"instance {pd.name} was silent for {self._settings.idle_timeout_s:g} s: the "
                "request is given up; ask for fewer tokens or raise idle_timeout_s of the router",
                status=504,
                code="timeout",
            ) from error
        except httpx.TransportError as error:
            pd.mark_down(describe(error))
            raise PeerLostError(f"instance {pd.name} was lost: {describe(error)}") from error


def _failed_stream(first: bytes) -> Reply:
    """Return the answer to a streamed request that failed before its first token."""
    event = first.partition(b"\n\n")[0].removeprefix(b"data: ")
    try:
        status = msgspec.json.decode(event, type=_ErrorEvent).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        status = 500
    if not 400 <= status <= 599:
        status = 500
    return Reply(status=status, headers={"content-type": "application/json"}, body=event)


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _finish(jobs: set[asyncio.Task[None]]) -> None:
    try:
        _, late = await asyncio.wait(jobs, timeout=JOB_GRACE_S)
    except asyncio.CancelledError:
        late = jobs
        raise
    finally:
        await _cancel(late)
