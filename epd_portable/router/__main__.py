"""Start the router: ``python -m epd_portable.router --settings '<json>'`` or ``@file``."""

from __future__ import annotations

import argparse
import errno
import logging
import signal
import socket
import sys
from types import FrameType

import uvicorn

from epd_portable import log
from epd_portable.errors import ConfigError, EPDError, PortInUseError
from epd_portable.router.app import create_app
from epd_portable.router.settings import RouterSettings, load_settings

logger = logging.getLogger("epd_portable.router")

BACKLOG = 2048
KEEP_ALIVE_S = 65
"""How long an idle connection of a client stays open: longer than clients keep theirs, or one that
sends in the moment in which it is closed gets no answer."""
SHUTDOWN_S = 5
"""How long answers that have begun may go on after SIGTERM."""


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM.

    Returns:
        0 after a clean stop, 2 if the settings are wrong or the port is taken.
    """
    parser = argparse.ArgumentParser(prog="python -m epd_portable.router", description=__doc__)
    parser.add_argument("--settings", required=True, help="JSON, or @path of a file that holds it")
    options = parser.parse_args(argv)
    # The server shuts down on these and then raises them again for whoever handled them before.
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)
    log.configure()
    try:
        settings = load_settings(options.settings)
        listener = listen(settings)
        serve(settings, listener)
    except EPDError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def listen(settings: RouterSettings) -> socket.socket:
    """Take the port before anything is started.

    Raises:
        PortInUseError: Somebody else has it.
        ConfigError: The address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. Without it a token can wait 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        where = f"{settings.host}:{settings.port}"
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"router address {where} is taken by another process: choose another port"
            ) from error
        raise ConfigError(f"router address {where} cannot be used: {error}") from error
    return listener


def serve(settings: RouterSettings, listener: socket.socket) -> None:
    """Answer requests on a listening socket until a signal comes."""
    host, port = listener.getsockname()[:2]
    logger.info("router for %s on http://%s:%d", settings.model, host, port)
    config = uvicorn.Config(
        create_app(settings),
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
