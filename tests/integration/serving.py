"""A stub of an engine's HTTP server, on a real socket: health, and responses that a test sets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tests.listening import stop_listening

DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Received:
    """A request as it reached an instance."""

    path: str
    headers: dict[str, str]
    raw: bytes
    query: str = ""
    scope: Any = None
    """Scope of the request in the server."""

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def params(self) -> Any:
        return self.body.get("ec_transfer_params")


async def well() -> Response:
    return Response()


Behaviour = Callable[[Received], Awaitable[Response]]


async def answer(received: Received) -> Response:
    return JSONResponse({"object": "chat.completion", "choices": []})


class Server(uvicorn.Server):
    """A server inside the test's own event loop; leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Serving:
    """An ASGI application on a loopback port."""

    host = "127.0.0.1"

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.port = 0
        self._server: Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._server = Server(
            uvicorn.Config(self._app, ws="none", log_config=None, timeout_graceful_shutdown=1)
        )
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            assert not self._task.done()
            await asyncio.sleep(0.01)

    def drop_connections(self, of: Received | None = None) -> None:
        """Break all connections, or that of one request."""
        assert self._server is not None
        for connection in list(self._server.server_state.connections):
            if of is None or getattr(connection, "scope", None) is of.scope:
                connection.transport.abort()

    async def stop(self) -> None:
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        for listening in self._server.servers:
            await stop_listening(listening)
        self.drop_connections()
        await self._task
        # Connections that were accepted in between.
        for _ in range(3):
            self.drop_connections()
            await asyncio.sleep(0.01)
        self._server = None


@dataclass
class StandIn:
    """An instance; `behaviour` decides how it answers generation requests."""

    name: str
    role: str
    behaviour: Behaviour = answer
    health: Callable[[], Awaitable[Response]] = well
    received: list[Received] = field(default_factory=list)
    aborted: int = 0
    serving: Serving = field(init=False)

    def __post_init__(self) -> None:
        routes = [
            Route("/health", self._answer_probe),
            Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "demo"}]})),
            Route("/{path:path}", self._generate, methods=["GET", "POST"]),
        ]
        self._arrived = asyncio.Condition()
        self.serving = Serving(Starlette(routes=routes))

    @property
    def address(self) -> str:
        return f"{self.serving.host}:{self.serving.port}"

    async def _answer_probe(self, request: Request) -> Response:
        return await self.health()

    async def _generate(self, request: Request) -> Response:
        received = Received(
            path=request.url.path,
            headers=dict(request.headers),
            raw=await request.body(),
            query=request.url.query,
            scope=request.scope,
        )
        async with self._arrived:
            self.received.append(received)
            self._arrived.notify_all()
        work = asyncio.ensure_future(self.behaviour(received))
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            gone.cancel()
            return work.result()
        work.cancel()
        await self.count_abort()
        return Response()

    async def count_abort(self) -> None:
        async with self._arrived:
            self.aborted += 1
            self._arrived.notify_all()

    async def until(self, condition: Callable[[StandIn], bool]) -> None:
        """Wait until something that arrived here makes the condition true."""
        async with self._arrived:
            await asyncio.wait_for(self._arrived.wait_for(lambda: condition(self)), DEADLINE_S)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
