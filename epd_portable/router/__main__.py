"""The router as a program: ``python -m epd_portable.router --settings @router.json``."""

from __future__ import annotations

import argparse
import gc
import logging
import sys

import uvloop

from epd_portable import log
from epd_portable.errors import EPDError
from epd_portable.router.server import Router
from epd_portable.router.serving import Stopping, listen_at, raise_file_limit, serve
from epd_portable.router.settings import RouterSettings, load_settings

logger = logging.getLogger("epd_portable.router")

HELP = """Start the router alone, without a launcher; SIGTERM or Ctrl-C stops it.

The settings are one JSON object: model, instances, secret_file, and the keys that a topology file
has below router (docs/configuration.md). For one instance of each role:

  {"port": 8000, "model": "demo", "secret_file": "~/epd.secret", "instances": [
    {"name": "encode-0", "role": "encode", "url": "http://127.0.0.1:20000"},
    {"name": "prefill_decode-0", "role": "prefill-decode", "url": "http://127.0.0.1:20001",
     "control": "tcp://127.0.0.1:20002"}]}
"""


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM.

    Answers that have begun end first, for ``drain_s`` at most; a second signal ends them at once.

    Returns:
        0 after a clean stop, 2 if the settings are wrong or a port is taken.
    """
    options = _parser().parse_args(argv)
    log.configure()
    raise_file_limit()
    try:
        uvloop.run(_serve(load_settings(options.settings)))
    except EPDError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m epd_portable.router",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--settings",
        metavar="JSON",
        required=True,
        help="settings as JSON, or @FILE of a file with them",
    )
    return parser


async def _serve(settings: RouterSettings) -> None:
    stop = Stopping()
    stop.on_signals()
    # What was imported stays. Looked through with all else it would delay every request by 20 ms,
    # again and again.
    gc.collect()
    gc.freeze()
    listeners = listen_at(settings)
    host, port = listeners[0].getsockname()[:2]
    scheme = "https" if settings.tls_cert_file else "http"
    logger.info("router for %s on %s://%s:%d", settings.model, scheme, host, port)
    await serve(Router(settings), listeners, stop)


if __name__ == "__main__":
    sys.exit(main())
