"""The router's HTTP side: endpoints, headers and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from epd_portable.errors import RequestError
from epd_portable.router.bodies import read_body
from epd_portable.router.control import ControlChannels
from epd_portable.router.metrics import Metrics
from epd_portable.router.pipeline import Pipeline
from epd_portable.router.pool import Pool, describe
from epd_portable.router.replies import Reply, error_reply, unavailable
from epd_portable.router.requests import (
    CHAT_PATH,
    COMPLETION_PATH,
    Call,
    read_chat,
    read_completion,
)
from epd_portable.router.settings import RouterSettings

logger = logging.getLogger(__name__)

PASSED_ON = ("authorization", "traceparent", "tracestate")
"""Headers of clients that reach instances. All others stay here, so none can be forged."""

IN_THREAD_BYTES = 256 * 1024
"""Bodies from this size on are read beside the event loop."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Router:
    """Everything that lives as long as the server."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.pool = Pool(settings)
        self.metrics = Metrics(self.pool.instances)
        self.control = ControlChannels(
            {instance.name: instance.control for instance in self.pool.of_role("prefill-decode")}
        )
        self.pipeline = Pipeline(settings, self.pool, self.control, self.metrics)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Connect to the instances and watch them.

        Raises:
            ConfigError: An address cannot be used.
        """
        try:
            await self.control.open()
            await self.pool.open()
            yield
        finally:
            await self.pipeline.close()
            await self.pool.close()
            await self.control.close()

    def read_chat(self, data: bytes) -> Call:
        """Read a chat request under this router's limits."""
        return read_chat(data, model=self.settings.model, max_items=self.settings.max_media_items)

    def read_completion(self, data: bytes) -> Call:
        """Read a text completion request."""
        return read_completion(data, model=self.settings.model)

    async def health(self, request: Request) -> Response:
        """Answer 200 while a request could be served, else 503; with the instances' states."""
        instances = {
            instance.name: {
                "role": instance.role,
                "healthy": instance.healthy,
                "in_flight": instance.in_flight,
                **({} if instance.healthy else {"reason": instance.reason}),
            }
            for instance in self.pool.instances
        }
        usable = any(instance.healthy for instance in self.pool.of_role("prefill-decode"))
        return JSONResponse(
            {"status": "ok" if usable else "unavailable", "instances": instances},
            status_code=200 if usable else 503,
        )

    async def show_metrics(self, request: Request) -> Response:
        """Answer with all metrics in Prometheus text format."""
        return Response(
            self.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def models(self, request: Request) -> Response:
        """Answer with a PD instance's list of models."""
        pd = self.pool.prefill_decode("models")
        if pd is None:
            return _response(error_reply(unavailable("no prefill+decode instance is healthy")))
        try:
            answer = await pd.client.get(
                "/v1/models",
                headers=_headers_for_instances(request),
                timeout=self.settings.probe_timeout_s,
            )
        except httpx.TransportError as error:
            pd.suspect()
            message = f"instance {pd.name}: {describe(error)}"
            return _response(error_reply(unavailable(message)))
        return Response(
            answer.content, answer.status_code, media_type=answer.headers.get("content-type")
        )


class Generation:
    """ASGI endpoint of one kind of generation; what a client gives up is given up everywhere."""

    def __init__(self, router: Router, path: str, read: Callable[[bytes], Call]) -> None:
        self._router = router
        self._path = path
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        metrics = self._router.metrics
        request = Request(scope, receive)
        with metrics.in_flight.track_inprogress():
            answer: asyncio.Task[None] | None = None
            try:
                headers = _headers_for_instances(request)
                call_or_refusal = await self._receive(request)
                answer = asyncio.create_task(self._answer(call_or_refusal, headers, send))
                if not await _finished_before_disconnect(answer, receive):
                    raise ClientDisconnect
            except ClientDisconnect:
                metrics.disconnects.labels(self._path).inc()

    async def _receive(self, request: Request) -> Call | RequestError:
        try:
            limit = self._router.settings.max_body_bytes
            body = await read_body(request, max_bytes=limit)
            if len(body) < IN_THREAD_BYTES:
                return self._read(body)
            return await asyncio.to_thread(self._read, body)
        except RequestError as error:
            return error

    async def _answer(self, call: Call | RequestError, headers: dict[str, str], send: Send) -> None:
        started = time.monotonic()
        metrics = self._router.metrics
        outgoing = _Outgoing(send, headers["x-request-id"])
        try:
            if isinstance(call, RequestError):
                raise call
            async with self._router.pipeline.exchange(call, headers) as reply:
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


def create_app(settings: RouterSettings) -> Starlette:
    """Return the router as an ASGI application; its lifespan connects to the instances."""
    router = Router(settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with router.running():
            yield

    return Starlette(
        lifespan=lifespan,
        routes=[
            Route(CHAT_PATH, Generation(router, CHAT_PATH, router.read_chat), methods=["POST"]),
            Route(
                COMPLETION_PATH,
                Generation(router, COMPLETION_PATH, router.read_completion),
                methods=["POST"],
            ),
            Route("/v1/models", router.models),
            Route("/health", router.health),
            Route("/metrics", router.show_metrics),
        ],
        exception_handlers={HTTPException: _http_error},
    )


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


def _headers_for_instances(request: Request) -> dict[str, str]:
    request_id = request.headers.get("x-request-id", "")
    if not _REQUEST_ID.fullmatch(request_id):
        request_id = uuid.uuid4().hex
    headers = {"content-type": "application/json", "x-request-id": request_id}
    return headers | {name: request.headers[name] for name in PASSED_ON if name in request.headers}


def _internal(request_id: str) -> RequestError:
    return RequestError(
        f"internal error of the router; its log has the reason under request {request_id}",
        status=500,
        code="internal_error",
    )


def _response(reply: Reply) -> Response:
    return Response(reply.body, reply.status, reply.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = ", ".join(f"POST {path}" for path in (CHAT_PATH, COMPLETION_PATH))
    message = (
        f"{request.method} {request.url.path}: {error.detail}; served are {known}, "
        "GET /v1/models, GET /health, GET /metrics"
    )
    code = {404: "unknown_path", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return _response(error_reply(RequestError(message, status=error.status_code, code=code)))
