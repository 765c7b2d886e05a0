"""Start the router: ``python -m epd_portable.router --settings '<json>'`` or ``@file``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator

import uvicorn
import uvloop

from epd_portable import log
from epd_portable.errors import ConfigError, EPDError, PortInUseError
from epd_portable.router.server import Router, with_cors
from epd_portable.router.settings import RouterSettings, load_settings

logger = logging.getLogger("epd_portable.router")

BACKLOG = 2048
KEEP_ALIVE_S = 65
"""How long an idle connection of a client stays open: longer than clients keep theirs, or one that
sends in the moment in which it is closed gets no answer."""
HEADERS_WITHIN_S = 30.0
"""In which a request's headers must have come, from the connection or its first byte on."""
LOOK_EVERY_S = 5.0


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM.

    Answers that have begun end first, for ``drain_s`` at most; a second signal ends them at once.

    Returns:
        0 after a clean stop, 2 if the settings are wrong or the port is taken.
    """
    parser = argparse.ArgumentParser(prog="python -m epd_portable.router", description=__doc__)
    parser.add_argument("--settings", required=True, help="JSON, or @path of a file that holds it")
    options = parser.parse_args(argv)
    log.configure()
    try:
        settings = load_settings(options.settings)
        listeners = [listen(settings.host, settings.port)]
        if settings.admin_port is not None:
            listeners.append(listen(settings.host, settings.admin_port))
        uvloop.run(serve(settings, listeners))
    except EPDError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def listen(host: str, port: int) -> socket.socket:
    """Take a port before anything is started.

    Raises:
        PortInUseError: Somebody else has it.
        ConfigError: The address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. Without it a token can wait 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"router address {where} is taken by another process: choose another port"
            ) from error
        raise ConfigError(f"router address {where} cannot be used: {error}") from error
    return listener


class _Server(uvicorn.Server):
    """Leaves signals to `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: RouterSettings, listeners: list[socket.socket]) -> None:
    """Answer requests on listening sockets until a signal comes.

    Raises:
        ConfigError: A file or an address of the settings cannot be used.
    """
    router = Router(settings)
    try:
        config = uvicorn.Config(
            with_cors(router),
            loop="none",
            http="httptools",
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
    stop = asyncio.Event()

    def stop_asked() -> None:
        if stop.is_set():
            server.should_exit = server.force_exit = True
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_asked)
    host, port = listeners[0].getsockname()[:2]
    scheme = "https" if settings.tls_cert_file else "http"
    logger.info("router for %s on %s://%s:%d", settings.model, scheme, host, port)
    serving = asyncio.create_task(server.serve(sockets=listeners))
    stopping = asyncio.create_task(_stop(stop, router, server))
    closing = asyncio.create_task(_close_silent(server))
    await serving
    for task in (stopping, closing):
        task.cancel()


async def _stop(stop: asyncio.Event, router: Router, server: uvicorn.Server) -> None:
    await stop.wait()
    drained = asyncio.create_task(router.drain())
    while not drained.done() and not server.should_exit:
        await asyncio.sleep(0.05)
    server.should_exit = True


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


if __name__ == "__main__":
    sys.exit(main())
