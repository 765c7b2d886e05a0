"""Generation requests over HTTP: headers in, answers out, and clients that go away."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from epd_portable.errors import RequestError
from epd_portable.router.bodies import read_body
from epd_portable.router.metrics import Metrics
from epd_portable.router.pipeline import Pipeline
from epd_portable.router.replies import Reply, error_reply, unavailable
from epd_portable.router.requests import Call

logger = logging.getLogger(__name__)

PASSED_ON = ("authorization", "traceparent", "tracestate")
"""Headers of clients that reach instances. All others stay here, so none can be forged."""

IN_THREAD_BYTES = 256 * 1024
"""Bodies from this size on are read beside the event loop."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Generation:
    """ASGI endpoint of one kind of generation; what a client gives up is given up everywhere."""

    def __init__(
        self,
        path: str,
        read: Callable[[bytes], Call],
        pipeline: Pipeline,
        metrics: Metrics,
        *,
        max_body_bytes: int,
    ) -> None:
        self._path = path
        self._read = read
        self._pipeline = pipeline
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        metrics = self._metrics
        request = Request(scope, receive)
        with metrics.in_flight.track_inprogress():
            headers = headers_for_instances(request)
            outgoing = _Outgoing(send, headers["x-request-id"])
            try:
                call_or_refusal = await self._receive(request)
                answer = asyncio.create_task(self._answer(call_or_refusal, headers, outgoing))
                if not await _finished_before_disconnect(answer, receive):
                    raise ClientDisconnect
            except ClientDisconnect:
                metrics.disconnects.labels(self._path).inc()
            except asyncio.CancelledError:
                # The server stops and waits no longer.
                if outgoing.status:
                    raise
                await outgoing.send(error_reply(unavailable("the router is stopping")))

    async def _receive(self, request: Request) -> Call | RequestError:
        try:
            body = await read_body(request, max_bytes=self._max_body_bytes)
            if len(body) < IN_THREAD_BYTES:
                return self._read(body)
            return await asyncio.to_thread(self._read, body)
        except RequestError as error:
            return error

    async def _answer(
        self, call: Call | RequestError, headers: dict[str, str], outgoing: _Outgoing
    ) -> None:
        started = time.monotonic()
        metrics = self._metrics
        try:
            if isinstance(call, RequestError):
                raise call
            async with self._pipeline.exchange(call, headers) as reply:
                metrics.first_byte_s.labels(self._path).observe(time.monotonic() - started)
                await outgoing.send(reply)
        except RequestError as error:
            await outgoing.send(error_reply(error))
        except Exception:
            logger.exception("request %s", headers["x-request-id"])
            if outgoing.status == 0:
                await outgoing.send(error_reply(_internal(headers["x-request-id"])))
        metrics.response_s.labels(self._path).observe(time.monotonic() - started)
        metrics.requests.labels(self._path, str(outgoing.status)).inc()


class _Outgoing:
    """Sends one reply; remembers its status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 0

    async def send(self, reply: Reply) -> None:
        headers = {**reply.headers, "x-request-id": self._request_id}
        if reply.rest is None:
            headers["content-length"] = str(len(reply.body))
        if reply.status == 413:
            # Part of the body may still be on its way: this connection serves no other request.
            headers["connection"] = "close"
        self.status = reply.status
        await self._send(
            {
                "type": "http.response.start",
                "status": reply.status,
                "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            }
        )
        if reply.rest is None:
            await self._send({"type": "http.response.body", "body": reply.body})
            return
        await self._send({"type": "http.response.body", "body": reply.body, "more_body": True})
        async for piece in reply.rest:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})


def headers_for_instances(request: Request) -> dict[str, str]:
    """Return what instances are told of a request's headers; always with ``x-request-id``."""
    request_id = request.headers.get("x-request-id", "")
    if not _REQUEST_ID.fullmatch(request_id):
        request_id = uuid.uuid4().hex
    headers = {"content-type": "application/json", "x-request-id": request_id}
    return headers | {name: request.headers[name] for name in PASSED_ON if name in request.headers}


async def _finished_before_disconnect(work: asyncio.Task[None], receive: Receive) -> bool:
    """Wait for the work; cancel it and return ``False`` if the client goes away first."""
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        for task in (work, watch):
            task.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _internal(request_id: str) -> RequestError:
    return RequestError(
        f"internal error of the router; its log has the reason under request {request_id}",
        status=500,
        code="internal_error",
    )
