"""A router on its sockets, from the first connection until it stops."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from epd_portable.errors import ConfigError, PortInUseError
from epd_portable.router.server import Router, with_cors

logger = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_S = 65
"""How long an idle connection of a client stays open: longer than clients keep theirs, or one that
sends in the moment in which it is closed gets no answer."""
HEADERS_WITHIN_S = 30.0
"""In which a request's headers must have come, from the connection or its first byte on."""
LOOK_EVERY_S = 5.0
MAX_HEAD_BYTES = 256 * 1024
"""Of a request's address and headers together; the parser itself has no limit."""


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Take a port before anything is started.

    Args:
        host: Address to listen on.
        port: 0 takes a free one.
        shared: Other processes of this router listen there too, and each gets its share.

    Raises:
        PortInUseError: Somebody else has it.
        ConfigError: The address is not one of this machine.
    """
    listener = _bound(host, port, shared=shared)
    listener.listen(BACKLOG)
    return listener


def reserve(host: str, port: int) -> socket.socket:
    """Take a port for processes of this router that will share it, see `listen`.

    The socket that is returned listens to nobody: it keeps the port while processes come and go.

    Raises:
        PortInUseError: Somebody else has it.
        ConfigError: The address is not one of this machine.
    """
    # Shared ports may be taken by any process of this user: one that serves is seen like this only.
    with _bound(host, port, shared=False) as alone:
        port = alone.getsockname()[1]
    return _bound(host, port, shared=True)


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Connections inherit it. Without it a token can wait 40 ms for the client's delayed ACK.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"router address {where} is taken by another process: choose another port"
            ) from error
        raise ConfigError(f"router address {where} cannot be used: {error}") from error
    return bound


class Stopping:
    """How a router is told to stop.

    Attributes:
        asked: Answers that have begun may end.
        at_once: They may not.
        abandoned: Nobody keeps the port for this process any more: it is left at once.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        self.abandoned = False

    def ask(self) -> None:
        """Let answers that have begun end; asked a second time, end them."""
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()

    def abandon(self) -> None:
        """Let answers that have begun end, and take no connection any more."""
        self.abandoned = True
        self.asked.set()

    def on_signals(self) -> None:
        """Ask on every SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask)


class _Protocol(HttpToolsProtocol):
    """Takes heads of requests of a limited size."""

    _head_bytes = 0

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, nbytes: int) -> None:
        self._head_bytes += nbytes
        if self._head_bytes > MAX_HEAD_BYTES:
            # What is raised here is to the parser a request that is none: 400, and the end.
            raise ValueError(f"a request's head of more than {MAX_HEAD_BYTES} bytes")


class _Server(uvicorn.Server):
    """Leaves signals to others."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    router: Router,
    listeners: list[socket.socket],
    stop: Stopping,
    *,
    started: Callable[[], None] | None = None,
) -> None:
    """Answer requests on listening sockets until told to stop.

    Args:
        router: What answers.
        listeners: Where.
        stop: Ends it.
        started: Called when the first request may come.

    Raises:
        ConfigError: A file or an address of the settings cannot be used.
    """
    settings = router.settings
    try:
        config = uvicorn.Config(
            with_cors(router),
            loop="none",
            http=_Protocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="on",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            ssl_certfile=settings.tls_cert_file,
            ssl_keyfile=settings.tls_key_file,
        )
        config.load()
    except OSError as error:  # Of the ssl module, too.
        raise ConfigError(
            f"router.tls_cert_file {settings.tls_cert_file} and router.tls_key_file "
            f"{settings.tls_key_file} cannot be used: {error}"
        ) from error
    server = _Server(config)
    watching = [
        asyncio.create_task(each)
        for each in (
            _stop(stop, router, server),
            _close_silent(server),
            _drop_deaf(server, settings.send_timeout_s),
            _tell(server, started),
        )
    ]
    try:
        await server.serve(sockets=listeners)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def _tell(server: uvicorn.Server, started: Callable[[], None] | None) -> None:
    while started is not None and not server.started:
        await asyncio.sleep(0.01)
    if started is not None:
        started()


async def _stop(stop: Stopping, router: Router, server: uvicorn.Server) -> None:
    await stop.asked.wait()
    if stop.abandoned:
        for listening in server.servers:
            listening.close()
    drained = asyncio.create_task(router.drain())
    at_once = asyncio.create_task(stop.at_once.wait())
    await asyncio.wait({drained, at_once}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    for task in (drained, at_once):
        task.cancel()


async def _close_silent(server: uvicorn.Server) -> None:
    """Close connections on which the headers of a request do not come."""
    since: dict[object, tuple[int, float]] = {}
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        now = time.monotonic()
        waiting: dict[object, tuple[int, float]] = {}
        for connection in list(server.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            resting = getattr(connection, "timeout_keep_alive_task", None) is not None
            if resting or (cycle is not None and not cycle.response_complete):
                continue
            begun = id(cycle)
            known, first_seen = since.get(connection, (begun, now))
            if known != begun:
                first_seen = now
            if now - first_seen > HEADERS_WITHIN_S:
                connection.transport.close()
            waiting[connection] = (begun, first_seen)
        since = waiting


async def _drop_deaf(server: uvicorn.Server, send_timeout_s: float) -> None:
    """Drop connections that are closed here, and whose clients take nothing of what they are sent.

    To close a connection waits for that without end.
    """
    since: dict[object, tuple[int, float]] = {}
    while True:
        await asyncio.sleep(min(LOOK_EVERY_S, send_timeout_s / 2))
        now = time.monotonic()
        unsent: dict[object, tuple[int, float]] = {}
        for connection in list(server.server_state.connections):
            transport = connection.transport
            if transport is None or not transport.is_closing():
                continue
            nbytes = transport.get_write_buffer_size()
            known, first_seen = since.get(connection, (-1, now))
            if known != nbytes:
                first_seen = now
            if now - first_seen > send_timeout_s:
                transport.abort()
            unsent[connection] = (nbytes, first_seen)
        since = unsent
