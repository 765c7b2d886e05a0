"""Stand-ins for what the router talks to, on real sockets.

`StandIn` speaks HTTP like an instance: health, models and generation, whose behaviour a test sets.
It reproduces no engine: answers are fixed, nothing is encoded or transferred. `ControlEnd` is the
ZMQ end of a prefill+decode instance: it records what arrives and sends what it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import msgspec
import uvicorn
import zmq
import zmq.asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from epd_portable.connector.curve import CurveKeys
from epd_portable.router import serving
from epd_portable.router.http.server_connection import Clients, ServerConnection
from epd_portable.router.server import Router
from epd_portable.router.serving import BACKLOG, listen
from epd_portable.wire import codec
from epd_portable.wire.messages import LOAD_PATH, AnyMessage, LoadReport, LoadWanted, Nack, NackCode
from tests import warm
from tests.listening import stop_listening

DEADLINE_S = 60.0
JSON = {"content-type": "application/json"}
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
"""How a request begins that is written to a socket."""
FILES_PER_REQUEST = 8
"""Both ends of its connections to the router, an instance and encoders, and some to spare."""


IMPORTED = (
    *("epd_portable.router.server", "epd_portable.router.serving"),
    *("epd_portable.launch.run.router_client", "grpc.aio", "uvloop"),
)
"""By routers, pickers and registrars."""


def start_process(*words: object, **streams: IO[str] | int) -> warm.Child:
    """Start what python does with ``-m MODULE ...`` or ``-c CODE ...``, of a router's modules."""
    return warm.nursery(*IMPORTED).popen(*words, **streams)


async def until(condition: Callable[[], object]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def at_once(most: int) -> int:
    """Return how many requests at a time the limit of open files allows."""
    return min(most, serving.raise_file_limit() // FILES_PER_REQUEST)


@dataclass(frozen=True, kw_only=True)
class Received:
    """One request as it reached an instance."""

    path: str
    headers: dict[str, str]
    raw: bytes
    query: str = ""
    scope: Any = None
    """Of the request in the server."""

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def params(self) -> Any:
        return self.body.get("ec_transfer_params")


async def well() -> Response:
    return Response()


async def silent() -> Response:
    await asyncio.Event().wait()
    raise AssertionError


Behaviour = Callable[[Received], Awaitable[Response]]


async def answer(received: Received) -> Response:
    return JSONResponse({"object": "chat.completion", "choices": []})


def refuse(status: int, message: str = "no") -> Behaviour:
    async def behave(received: Received) -> Response:
        error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
        return JSONResponse({"error": error}, status_code=status)

    return behave


def says(content: Any) -> Behaviour:
    async def behave(received: Received) -> Response:
        return JSONResponse(content)

    return behave


def once(event: asyncio.Event, then: Behaviour = answer) -> Behaviour:
    """Return a behaviour that waits for an event first."""

    async def behave(received: Received) -> Response:
        await event.wait()
        return await then(received)

    return behave


async def forever(received: Received) -> Response:
    return await silent()


def full(for_ms: int) -> Behaviour:
    """An encoder that is full, and says for how long."""

    async def behave(received: Received) -> Response:
        return JSONResponse({}, status_code=429, headers={"retry-after-ms": str(for_ms)})

    return behave


def dying(*instances: StandIn) -> Behaviour:
    """Those that break all of their connections when they are asked."""

    async def behave(received: Received) -> Response:
        for each in instances:
            if any(one is received for one in each.received):
                asyncio.get_running_loop().call_soon(each.serving.drop_connections)
        return await forever(received)

    return behave


def refusing(control: ControlEnd, code: NackCode, detail: str, then: Behaviour) -> Behaviour:
    """An instance that refuses every transfer of a request on its control channel first."""

    async def behave(received: Received) -> Response:
        await control.refuse(received.params, code, detail)
        return await then(received)

    return behave


def in_turn(instances: Sequence[StandIn], *behaviours: Behaviour) -> list[Received]:
    """Let instances answer by some behaviours in turn, whichever is asked, then by the last one."""
    asked: list[Received] = []

    async def behave(received: Received) -> Response:
        asked.append(received)
        return await behaviours[min(len(asked), len(behaviours)) - 1](received)

    for each in instances:
        each.behaviour = behave
    return asked


def stream(pieces: Callable[[], AsyncIterator[bytes]]) -> Behaviour:
    async def behave(received: Received) -> Response:
        return StreamingResponse(pieces(), media_type="text/event-stream")

    return behave


def streamed(*pieces: bytes | asyncio.Event) -> Behaviour:
    """Answer by a stream of these pieces; an event is waited for."""

    async def one_by_one() -> AsyncIterator[bytes]:
        for each in pieces:
            if isinstance(each, bytes):
                yield each
            else:
                await each.wait()

    return stream(one_by_one)


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


class RouterServing(Serving):
    """A router in the test's own event loop, on its own server."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.host, self.port = router.settings.host, router.settings.port
        self._clients = Clients(router.serve)
        self._listening: asyncio.Server | None = None

    async def start(self) -> None:
        listener = listen(self.host, self.port)
        self.port = listener.getsockname()[1]
        await self.router.open()
        self._listening = await asyncio.get_running_loop().create_server(
            lambda: ServerConnection(self._clients, self.port), sock=listener, backlog=BACKLOG
        )
        # What a router sends before its end of a control channel is connected is lost.
        for each in self.router._control._sockets.values():
            assert await each.poll(int(DEADLINE_S * 1000), zmq.POLLOUT)

    def drop_connections(self) -> None:
        for connection in tuple(self._clients.open):
            connection.transport.abort()

    async def stop(self) -> None:
        if self._listening is None:
            return
        listening, self._listening = self._listening, None
        await stop_listening(listening)
        while self._clients.open or self._clients.tasks:
            self.drop_connections()
            await asyncio.sleep(0.01)
        await self.router.close()


@dataclass
class StandIn:
    """An instance; `behaviour` decides how it answers generation requests."""

    name: str
    role: str
    behaviour: Behaviour = answer
    health: Callable[[], Awaitable[Response]] = well
    received: list[Received] = field(default_factory=list)
    aborted: int = 0
    load: LoadReport | None = None
    """What an encode instance says of itself, if anything."""
    serving: Serving = field(init=False)

    def __post_init__(self) -> None:
        routes = [
            Route("/health", self._answer_probe),
            Route(LOAD_PATH, self._tell_load),
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

    async def _tell_load(self, request: Request) -> Response:
        if self.load is None:
            return Response(status_code=404)
        return Response(msgspec.json.encode(self.load), media_type="application/json")

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


class ControlEnd:
    """The control channel of a prefill+decode instance, for holders of its keys."""

    def __init__(self, held: CurveKeys) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.curve_secretkey = held.server_secret
        self._socket.curve_publickey = held.server_public
        self._socket.curve_server = True
        self._connected = self._socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"

    async def until_connected(self) -> None:
        """Wait for this end of a connection to be made."""
        await asyncio.wait_for(self._connected.recv_multipart(), DEADLINE_S)

    async def receive(self) -> tuple[str, AnyMessage]:
        """Return the next message and the identity of its sender."""
        identity, data = await asyncio.wait_for(self._socket.recv_multipart(), DEADLINE_S)
        return identity.decode(), codec.decode(data)[0]

    async def receive_of(self, transfer_id: str) -> AnyMessage:
        """Return the next message about a transfer, repetitions of others aside."""
        while True:
            _, message = await self.receive()
            if message.transfer_id == transfer_id:
                return message

    async def send(self, identity: str, data: bytes) -> None:
        """Send any bytes to a router, once it is connected."""

        async def sent() -> None:
            while True:
                try:
                    return await self._socket.send_multipart([identity.encode(), data])
                except zmq.ZMQError as error:
                    if error.errno != zmq.EHOSTUNREACH:
                        raise
                await asyncio.sleep(0.01)

        await asyncio.wait_for(sent(), DEADLINE_S)

    async def tell(self, load: LoadReport) -> None:
        """Wait until a router wants to know how busy the instance is, and tell it."""
        while True:
            identity, message = await self.receive()
            if isinstance(message, LoadWanted):
                return await self.send(identity, codec.encode(load, session="stand-in"))

    async def refuse(self, params: Any, code: NackCode, detail: str) -> None:
        """Refuse every transfer of a request."""
        for transfer in params["transfers"]:
            nack = Nack(transfer_id=transfer["transfer_id"], code=code, detail=detail)
            data = codec.encode(nack, session="stand-in")
            await self.send(params["reply_to"], data)

    def close(self) -> None:
        self._context.destroy(linger=0)
