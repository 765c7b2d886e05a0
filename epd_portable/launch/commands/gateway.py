"""The command ``epd-launch gateway``."""

from __future__ import annotations

import logging
import ssl

import click
import uvloop

from epd_portable.certificates import RenewedContext
from epd_portable.errors import ConfigError
from epd_portable.launch.commands.command_line import PORT, ServerUrl, json_lines_option, printer
from epd_portable.launch.notices import Notice

_FILE = click.Path(exists=True, dir_okay=False)


@click.command()
@click.option(
    "--front", "fronts", multiple=True, required=True, type=ServerUrl(), metavar="URL",
    help="A front; may be repeated.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", help="Where it listens.")
@click.option("--port", type=PORT, default=8000, metavar="N")
@click.option(
    "--drain-s", type=click.FloatRange(min=0), default=30.0, metavar="S",
    help="Longest time for open requests at a stop.",
)  # fmt: skip
@click.option(
    "--tls-cert-file", type=_FILE, metavar="F", help="Its certificate, read again when it changes."
)
@click.option("--tls-key-file", type=_FILE, metavar="F", help="Key of that certificate.")
@click.option(
    "--tls-ca-file", type=_FILE, metavar="F",
    help="Authorities of fronts whose URLs are https.  [default: those of the system]",
)  # fmt: skip
@json_lines_option
def gateway(
    fronts: tuple[str, ...],
    host: str,
    port: int,
    drain_s: float,
    tls_cert_file: str | None,
    tls_key_file: str | None,
    tls_ca_file: str | None,
    as_json: bool,
) -> None:
    """Serve one address for several fronts.

    Bytes are forwarded, not read.
    For users who have nothing that balances plain vLLM servers, as a Kubernetes Service, llm-d or
    Envoy does. A request goes to the front with the fewest open requests; requests with the same
    header x-session-id go to the same front while it has capacity. Before the first byte of a
    response it is sent again to another front. API keys, limits and media are the fronts' business.

    GET /health returns 200 while a front gets requests; GET /metrics has the gateway's own metrics.
    At Ctrl-C or SIGTERM open requests have --drain-s seconds to end.

      epd-launch gateway --front http://10.0.0.1:8000 --front http://10.0.0.2:8000 --port 8080

    Exit status: 0 when a stop was requested, 2 on bad input.
    """
    from epd_portable.gateway import Gateway, serve

    if len(set(fronts)) < len(fronts):
        raise ConfigError("--front: a front is named twice")
    if (tls_cert_file is None) != (tls_key_file is None):
        raise ConfigError("--tls-cert-file and --tls-key-file belong together: set both or neither")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    tls = None
    try:
        if tls_cert_file is not None:
            assert tls_key_file is not None
            tls = RenewedContext.load(tls_cert_file, tls_key_file)
        to_fronts = ssl.create_default_context(cafile=tls_ca_file) if tls_ca_file else None
        found = Gateway(fronts, to_fronts)
        say = printer(as_json=as_json)
        uvloop.run(
            serve(
                found,
                host,
                port,
                drain_s=drain_s,
                say=lambda event, text: say(Notice(event, text)),
                tls=tls,
            )
        )
    except ssl.SSLError as error:
        raise ConfigError(f"a file of TLS cannot be used: {error}") from error
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be had: {error}; choose another --port") from error
