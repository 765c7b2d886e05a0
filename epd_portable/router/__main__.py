"""Start the router: ``python -m epd_portable.router --settings '<json>'`` or ``@file``."""

from __future__ import annotations

import argparse
import logging
import sys

import uvloop

from epd_portable import log
from epd_portable.errors import EPDError
from epd_portable.router.server import Router
from epd_portable.router.serving import Stop, listen, serve
from epd_portable.router.settings import RouterSettings, load_settings

logger = logging.getLogger("epd_portable.router")


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
        uvloop.run(_serve(settings))
    except EPDError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(settings: RouterSettings) -> None:
    listeners = [listen(settings.host, settings.port)]
    if settings.admin_port is not None:
        listeners.append(listen(settings.host, settings.admin_port))
    host, port = listeners[0].getsockname()[:2]
    scheme = "https" if settings.tls_cert_file else "http"
    logger.info("router for %s on %s://%s:%d", settings.model, scheme, host, port)
    stop = Stop()
    stop.on_signals()
    await serve(Router(settings), listeners, stop)


if __name__ == "__main__":
    sys.exit(main())
