"""A router on its sockets, from the first connection until it stops."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Coroutine
from typing import Any

import anyio

from epd_portable.errors import ConfigError, PortInUseError
from epd_portable.router.http.server_connection import Clients, ServerConnection
from epd_portable.router.server import Router
from epd_portable.router.settings import RouterSettings

logger = logging.getLogger(__name__)

BACKLOG = 2048
LOOK_EVERY_S = 5.0
"""Between looks for connections on which nothing happens."""
ANSWERS_WITHIN_S = 1.0
"""In which answers that were not waited for any longer may still end by themselves."""
LAST_WORDS_S = 1.0
"""In which clients take the end of their answers."""
OPEN_FILES = 65_536
"""What this process takes of the open files that it is allowed; service managers allow 1024 by
default, for the sake of programs that use ``select``."""
ENOUGH_FILES = 8192
"""With fewer the log says how far they go."""
FILES_PER_REQUEST = 3
"""A connection to the client, one to its instance and one for each encode job."""


def raise_file_limit() -> int:
    """Let this process, and those that it starts, have `OPEN_FILES` if the system allows it.

    Returns:
        How many files it may have open now; the log says so if these are not many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # No limit at all is none that Linux takes for open files.
    allowed = max(soft, min(hard, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < ENOUGH_FILES:
        logger.warning(
            "this process may have %d files open: about %d requests at a time; raise the hard "
            "limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker)",
            allowed,
            allowed // FILES_PER_REQUEST,
        )
    return allowed


def listen(host: str, port: int) -> socket.socket:
    """Take a port before anything is started.

    Args:
        port: 0 takes a free one.

    Raises:
        PortInUseError: Another process has it.
        ConfigError: The address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. Without it a token can wait 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"router address {where} is taken by another process: choose another port"
            ) from error
        raise ConfigError(f"router address {where} cannot be used: {error}") from error
    listener.listen(BACKLOG)
    return listener


def listen_at(settings: RouterSettings) -> list[socket.socket]:
    """Take the ports of a router's settings; see `listen`."""
    ports = [settings.port, *filter(None, [settings.admin_port])]
    return [listen(settings.host, port) for port in ports]


class Stopping:
    """Whether a router shall stop: when answers that have begun have ended, or at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def request_stop(self) -> None:
        """Let answers that have begun end; asked a second time, end them."""
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()

    def on_signals(self) -> None:
        """Request it on every SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)


async def serve(router: Router, listeners: list[socket.socket], stop: Stopping) -> None:
    """Answer requests on listening sockets until the stop.

    Raises:
        ConfigError: A file or an address of the settings cannot be used.
    """
    loop = asyncio.get_running_loop()
    tls = _tls(router.settings)
    clients = Clients(router.serve)
    try:
        await router.open()
        servers = [
            await loop.create_server(
                functools.partial(ServerConnection, clients, listener.getsockname()[1]),
                sock=listener,
                ssl=tls,
                backlog=BACKLOG,
            )
            for listener in listeners
        ]
        looking = asyncio.create_task(_look(clients, router.settings.send_timeout_s))
        await stop.asked.wait()
        await first_of(router.drain(), stop.at_once.wait())
        for server in servers:
            server.close()
        await _end(clients)
        looking.cancel()
    finally:
        await router.close()


def _tls(settings: RouterSettings) -> ssl.SSLContext | None:
    """Return what connections are secured with, if they are.

    Raises:
        ConfigError: A file cannot be used.
    """
    if not settings.tls_cert_file:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
    except OSError as error:  # Of the ssl module, too.
        raise ConfigError(
            f"router.tls_cert_file {settings.tls_cert_file} and router.tls_key_file "
            f"{settings.tls_key_file} cannot be used: {error}"
        ) from error
    return context


async def _look(clients: Clients, send_timeout_s: float) -> None:
    while True:
        await asyncio.sleep(min(LOOK_EVERY_S, send_timeout_s / 2))
        clients.look(send_timeout_s)


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of some is over, and give up the others."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _end(clients: Clients) -> None:
    """Close all connections: answers that have not ended get a moment, and then an error."""
    clients.stop()
    for within_s in (ANSWERS_WITHIN_S, LAST_WORDS_S):
        if clients.tasks:
            await asyncio.wait(clients.tasks, timeout=within_s)
        for task in clients.tasks:
            task.cancel()
    with anyio.move_on_after(LAST_WORDS_S):
        while clients.open:
            await asyncio.sleep(0.01)
    for connection in tuple(clients.open):
        connection.transport.abort()
