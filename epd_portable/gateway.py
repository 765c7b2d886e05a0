"""The gateway: one address for several fronts. It forwards bytes and reads none of them.

Each front looks like a plain vLLM server, so a balancer of those also balances fronts: a Kubernetes
Service, llm-d, Envoy. This is for users who have nothing of that kind. A request goes to the front
with the fewest open requests, or to the one that its session (header ``x-session-id``) had before.
Before the first byte of a response it is sent again to another front, if its body is short enough
to be held. Both ends are aiohttp's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from yarl import URL

from epd_portable.errors import RequestError
from epd_portable.instruments import Instruments
from epd_portable.placement.instances import HashRing
from epd_portable.placement.profiles.selection_types import SESSION_HEADER
from epd_portable.responses import (
    BODY_TIMEOUT_S,
    MAX_HEAD_BYTES,
    body_timeout,
    error_reply,
    unavailable,
)

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
HELD_BYTES = 16 << 20
"""Largest body that is held until its response begins, to be sent again."""
ALL_HELD_BYTES = 512 << 20
"""Most bytes of all bodies; beyond it bodies are passed on while they arrive."""
_LINGERING_S = 2.0
"""Longest time for a client to send the rest of a body after its response."""
_BUSY = frozenset({429, 503})
"""Statuses by which a front reports that another one may serve the request."""
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"}
    | {"te", "trailer", "transfer-encoding", "upgrade", "expect"}
)
"""Headers of one connection (RFC 9110, 7.6.1), and one that aiohttp handles."""


@dataclass(eq=False, slots=True)
class FrontServer:
    """A front.

    Attributes:
        url: Without a path, or with the one below which it serves.
        load: Requests that it was given and that have not ended.
        problem: Why it gets no requests; empty if it gets some.
    """

    url: URL
    load: int = 0
    problem: str = "has not been queried yet"
    weight: float = 1.0

    @property
    def name(self) -> str:
        """Return host and port of its URL."""
        return self.url.authority


@dataclass(slots=True)
class _Body:
    """A request's body: what is held of it, and the connection if more comes.

    Attributes:
        nbytes: Bytes of it that are in memory.
    """

    held: bytes = b""
    rest: aiohttp.StreamReader | None = None
    nbytes: int = 0

    @property
    def may_be_sent_again(self) -> bool:
        return self.rest is None

    def stream(self) -> bytes | AsyncIterator[bytes]:
        return self.held if self.rest is None else self._pieces(self.rest)

    async def _pieces(self, rest: aiohttp.StreamReader) -> AsyncIterator[bytes]:
        yield self.held
        async for piece in rest.iter_any():
            yield piece


class GatewayMetrics(Instruments):
    """Metrics of a gateway, at ``/metrics``."""

    def __init__(self) -> None:
        super().__init__()
        name, counter = "epd_gateway_{}".format, self._counter
        self.responses = counter(name("responses"), "Responses of fronts.", "front status")
        self.retries = counter(name("retries"), "Requests that went to another front.", "front")
        self.open = self._gauge(name("open_requests"), "Requests that have not ended.", "front")
        self.up = self._gauge(name("front_up"), "1 for a front that gets requests.", "front")


class Gateway:
    """Forwards requests.

    Args:
        fronts: URLs of fronts.
        tls: For fronts whose URLs are ``https``; ``None`` for the system's authorities.
    """

    def __init__(self, fronts: Sequence[str], tls: ssl.SSLContext | None = None) -> None:
        self.fronts = [FrontServer(URL(each.rstrip("/"))) for each in fronts]
        self.metrics = GatewayMetrics()
        self._tls = tls if tls is not None else True
        self._held_bytes = 0
        self._is_draining = False

    def application(self) -> web.Application:
        """Return the application to be served."""
        found = web.Application(client_max_size=0)
        found.router.add_get("/health", self._health)
        found.router.add_get("/metrics", self._page)
        found.router.add_route("*", "/{path:.*}", self._serve)
        found.cleanup_ctx.append(self._run)
        return found

    def drain(self) -> None:
        """Return 503 for ``/health`` from now on; requests are served until they stop coming."""
        self._is_draining = True

    async def _run(self, _: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ssl=self._tls)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
        )
        async with self._session:
            probes = [asyncio.create_task(self._watch(each)) for each in self.fronts]
            yield
            for each in probes:
                each.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    # -- fronts -----------------------------------------------------------------------------------

    async def _watch(self, front: FrontServer) -> None:
        while True:
            timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
            try:
                async with self._session.get(front.url / "health", timeout=timeout) as answer:
                    self._note(front, "" if answer.status == 200 else f"status {answer.status}")
            except (aiohttp.ClientError, TimeoutError) as error:
                self._note(front, str(error) or f"no response within {PROBE_TIMEOUT_S:g} s")
            await asyncio.sleep(PROBE_INTERVAL_S)

    def _note(self, front: FrontServer, problem: str) -> None:
        if problem and not front.problem:
            logger.warning("front %s gets no requests: %s", front.url, problem)
        elif front.problem and not problem:
            logger.info("front %s gets requests", front.url)
        front.problem = problem
        self.metrics.up.labels(front.name).set(not problem)

    def _choose(self, session: str | None, tried: Collection[FrontServer]) -> FrontServer | None:
        usable = [each for each in self.fronts if not each.problem and each not in tried]
        if session and usable:
            return HashRing(usable).choose(session)
        return min(usable, key=lambda each: each.load, default=None)

    # -- responses of its own ---------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        """200 if a front gets requests."""
        ready = not self._is_draining and any(not each.problem for each in self.fronts)
        fronts = {str(each.url): each.problem or "up" for each in self.fronts}
        state = {"status": "ok" if ready else "unavailable", "fronts": fronts}
        return web.json_response(state, status=200 if ready else 503)

    async def _page(self, _: web.Request) -> web.Response:
        for each in self.fronts:
            self.metrics.open.labels(each.name).set(each.load)
        page = generate_latest(self.metrics.registry)
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE_LATEST})

    # -- requests ---------------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = _Body()
        try:
            if "upgrade" in request.headers:
                raise RequestError(
                    "the gateway forwards no upgraded connections: connect to a front",
                    status=501,
                    code="not_served",
                )
            await self._read(request, body)
            return await self._forward(request, body)
        except RequestError as error:
            reply = error_reply(error, request.path)
            response = web.Response(body=reply.body, status=reply.status, headers=reply.headers)
            if error.status == 408:
                response.force_close()
            return response
        finally:
            self._held_bytes -= body.nbytes

    async def _read(self, request: web.Request, body: _Body) -> None:
        """Read a whole body, or its beginning if it is too long to be held.

        Raises:
            RequestError: It does not come in time.
        """
        if not request.body_exists:
            return
        pieces = []
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for piece in request.content.iter_any():
                    pieces.append(piece)
                    body.nbytes += len(piece)
                    self._held_bytes += len(piece)
                    if body.nbytes > HELD_BYTES or self._held_bytes > ALL_HELD_BYTES:
                        body.rest = request.content
                        break
        except TimeoutError:
            raise body_timeout(BODY_TIMEOUT_S) from None
        body.held = b"".join(pieces)

    async def _forward(self, request: web.Request, body: _Body) -> web.StreamResponse:
        """Send a request to one front after another until one has a response.

        Raises:
            RequestError: No front has.
        """
        session, tried = request.headers.get(SESSION_HEADER), set[FrontServer]()
        why = ""
        while (front := self._choose(session, tried)) is not None:
            tried.add(front)
            front.load += 1
            try:
                answer = await self._send(request, body, front)
                async with answer:
                    is_last = not body.may_be_sent_again or not self._choose(session, tried)
                    if answer.status not in _BUSY or is_last:
                        return await self._pass_on(request, answer, front)
                    why = f"status {answer.status}"
            except aiohttp.ClientConnectorError as error:
                why = str(error)
                self._note(front, why)
            except (aiohttp.ClientError, TimeoutError) as error:
                why = str(error) or "the connection has ended"
                if not body.may_be_sent_again:
                    break
            finally:
                front.load -= 1
            self.metrics.retries.labels(front.name).inc()
            logger.warning("%s %s: front %s %s", request.method, request.path, front.url, why)
        raise unavailable(f"no front serves the request now: {why or self._problems()}")

    def _problems(self) -> str:
        return "; ".join(f"{each.url} {each.problem}" for each in self.fronts)

    async def _send(
        self, request: web.Request, body: _Body, front: FrontServer
    ) -> aiohttp.ClientResponse:
        """Return the head of a front's response."""
        sent = _end_to_end(request.headers)
        before = request.headers.getall("x-forwarded-for", [])
        sent["x-forwarded-for"] = ", ".join(filter(None, (*before, request.remote)))
        sent["x-forwarded-proto"] = request.headers.get("x-forwarded-proto", request.scheme)
        # Of a target with scheme and host (RFC 9112, 3.2.2) only the path is of the front.
        path = request.raw_path
        path = path if path.startswith("/") else request.rel_url.raw_path_qs
        return await self._session.request(
            request.method,
            URL(f"{front.url}{path}", encoded=True),
            headers=sent,
            data=body.stream() if request.body_exists else None,
            allow_redirects=False,
        )

    async def _pass_on(
        self, request: web.Request, answer: aiohttp.ClientResponse, front: FrontServer
    ) -> web.StreamResponse:
        """Pass a response on while it comes; end the connection where the front ends it early."""
        self.metrics.responses.labels(front.name, answer.status).inc()
        response = web.StreamResponse(
            status=answer.status, reason=answer.reason, headers=_end_to_end(answer.headers)
        )
        try:
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
        except aiohttp.ClientError as error:
            # The status is out: only a broken connection notifies the client.
            logger.warning("front %s ended a response early: %s", front.url, error)
            if request.transport is not None:
                request.transport.abort()
            return response
        await response.write_eof()
        return response


def _end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers that are not of one connection."""
    named = {each.strip().lower() for each in headers.get("connection", "").split(",")}
    dropped = _HOP_BY_HOP | named
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in dropped
    )


def runner_of(gateway: Gateway, drain_s: float) -> web.AppRunner:
    """Return what serves a gateway; its cleanup waits ``drain_s`` for open requests."""
    return web.AppRunner(
        gateway.application(),
        access_log=None,
        auto_decompress=False,
        handle_signals=False,
        handler_cancellation=True,
        lingering_time=_LINGERING_S,
        max_line_size=MAX_HEAD_BYTES,
        max_field_size=MAX_HEAD_BYTES,
        shutdown_timeout=drain_s,
    )


async def serve(
    gateway: Gateway,
    host: str,
    port: int,
    *,
    drain_s: float,
    say: Callable[[Literal["ready", "draining", "stopped"], str], None],
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        drain_s: Longest time that open requests have then.
        say: Takes each event, and a text about it.
        tls: Of its own address.

    Raises:
        OSError: The address cannot be had.
    """
    runner = runner_of(gateway, drain_s)
    await runner.setup()
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopped.set)
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls, backlog=1024).start()
        address = f"{'https' if tls else 'http'}://{host}:{port}"
        say("ready", f"ready: {address} ({len(gateway.fronts)} fronts)")
        await stopped.wait()
        gateway.drain()
        say("draining", f"open requests have {drain_s:g} s")
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await runner.cleanup()
    say("stopped", "stopped")
