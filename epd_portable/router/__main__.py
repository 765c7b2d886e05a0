"""The router as a program: ``python -m epd_portable.router --settings @router.json``."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from pathlib import Path

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
        0 after a clean stop, 2 if the settings are wrong, a port is taken, or Envoy cannot serve.
    """
    options = _parser().parse_args(argv)
    log.configure()
    raise_file_limit()
    try:
        uvloop.run(_serve(load_settings(options.settings), options))
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
    picker = parser.add_argument_group("as an endpoint picker, with envoy in the settings")
    picker.add_argument(
        "--listen",
        metavar="ADDRESS",
        default="",
        help="serve the endpoint picker protocol for a gateway of your own, at unix:PATH, or at "
        "HOST:PORT with --gateway-ca or with networks as envoy (default: port 9002), and HTTP at "
        "the host and port of the settings",
    )
    picker.add_argument(
        "--gateway-ca",
        type=Path,
        metavar="FILE",
        help="certificates in PEM that sign the gateway's, which it must show at HOST:PORT; this "
        "end shows tls_cert_file of the settings, or one that signs itself",
    )
    threads = "worker threads of the Envoy that is started (default: one per core)"
    picker.add_argument("--threads", type=int, default=os.cpu_count() or 1, help=threads)
    folder = "folder for envoy.json and endpoints.json (default: a temporary one)"
    picker.add_argument("--folder", type=Path, help=folder)
    return parser


async def _serve(settings: RouterSettings, options: argparse.Namespace) -> None:
    stop = Stopping()
    stop.on_signals()
    is_picker = settings.envoy or options.listen
    if is_picker:
        # gRPC is of an extra.
        from epd_portable.router import picker_server
    # What was imported stays. Looked through with all else it would delay every request by 20 ms,
    # again and again.
    gc.collect()
    gc.freeze()
    if is_picker:
        return await picker_server.serve(settings, options, stop)
    listeners = listen_at(settings)
    host, port = listeners[0].getsockname()[:2]
    scheme = "https" if settings.tls_cert_file else "http"
    logger.info("router for %s on %s://%s:%d", settings.model, scheme, host, port)
    await serve(Router(settings), listeners, stop)


if __name__ == "__main__":
    sys.exit(main())
