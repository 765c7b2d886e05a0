"""The router as an endpoint picker: ``python -m epd_portable.router.picker``.

Envoy takes clients' requests in and carries answers; this process is asked about each request, over
Envoy's protocol for external processors (`ext_proc`), as the endpoint pickers of the Gateway API
inference extension are. It reads the request, chooses as the router does, starts encode jobs, has
a prompt computed by a prefill instance, rewrites the request and names the one that answers it: a
`Consultation`. Here are the process and the ports at which it can be asked.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import ipaddress
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop

from epd_portable import log
from epd_portable.config.roles import Duty
from epd_portable.errors import ConfigError, EPDError
from epd_portable.router import envoy, ext_proc, serving
from epd_portable.router.consultation import Picker
from epd_portable.router.ext_proc import HealthCheckRequest, HealthCheckResponse
from epd_portable.router.server import Router
from epd_portable.router.serving import Stopping, first_of
from epd_portable.router.settings import RouterSettings, load_settings

logger = logging.getLogger("epd_portable.router")


def listen_for_gateway(
    server: grpc.aio.Server, settings: RouterSettings, options: argparse.Namespace, address: str
) -> None:
    """Listen where only a gateway can ask, encrypted beyond a UNIX socket.

    Raises:
        ConfigError: Anybody could ask, or the address or a file cannot be used.
    """
    ca, is_socket = options.gateway_ca, address.startswith("unix:")
    if options.listen and is_socket == bool(ca or options.gateway_network):
        raise ConfigError(
            f"--listen {address}: answers of the picker tell the token of the instances; "
            "listen at unix:PATH, where the socket's permissions say who may ask, or at "
            "HOST:PORT with --gateway-ca FILE or --gateway-network NETWORK"
        )
    try:
        if is_socket:
            server.add_insecure_port(address)
            return
        key, cert = settings.tls_key_file, settings.tls_cert_file
        credentials = grpc.ssl_server_credentials(
            [(Path(key).read_bytes(), Path(cert).read_bytes()) if key and cert else self_signed()],
            root_certificates=ca.read_bytes() if ca else None,
            require_client_auth=ca is not None,
        )
        server.add_secure_port(address, credentials)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"picker address {address} cannot be used: {error}") from error


def self_signed() -> tuple[bytes, bytes]:
    """Make a key and a certificate that signs itself, in PEM: it encrypts and proves nothing.

    Raises:
        ConfigError: What makes them is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError(
            'a certificate of its own needs the package cryptography: install "epd-portable[envoy]"'
            ", or set tls_cert_file and tls_key_file in the settings"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "epd-picker")])
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.timezone.utc)
    cert = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + 3650 * day)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(pem, *plain), cert.public_bytes(pem)


def health_service(router: Router) -> grpc.GenericRpcHandler:
    """Return gRPC's health service, with the names of the endpoint picker protocol."""

    async def check(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if request.service not in ("", "liveness", "readiness", ext_proc.METHOD[0]):
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        serves = request.service == "liveness" or router.state == "ok"
        return HealthCheckResponse(status=ext_proc.SERVING if serves else ext_proc.NOT_SERVING)

    service, method = ext_proc.HEALTH
    handler = grpc.unary_unary_rpc_method_handler(
        check,
        request_deserializer=HealthCheckRequest.FromString,
        response_serializer=HealthCheckResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(service, {method: handler})


async def serve(settings: RouterSettings, folder: Path, options: argparse.Namespace) -> None:
    """Answer Envoy until a signal comes, or Envoy ends.

    Args:
        settings: Of the router; its host and port are those of the Envoy that is started, or, for a
            gateway of others, where this process itself answers as a router does.
        options: Of the command line, see `main`.

    Raises:
        ConfigError: An address or a file of the settings cannot be used, or Envoy ended.
    """
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    listen_for_gateway(server, settings, options, options.listen or f"unix:{folder}/picker.sock")
    router = Router(settings)
    duties: set[Duty] = {"answer"}
    if settings.hop_keys_file:
        # Hops that answer elsewhere have prompts computed here.
        duties.add("prefill")
    endpoints = envoy.Endpoints(folder / "endpoints.json", router.instances, duties)
    picker = Picker(router, endpoints, options.gateway_network)
    server.add_generic_rpc_handlers((picker.service(), health_service(router)))
    stop = Stopping()
    stop.on_signals()
    if not options.listen:
        return await _with_envoy(router, endpoints, server, folder, stop, options.threads)
    ports = [settings.port, *filter(None, [settings.admin_port])]
    listeners = [serving.listen(settings.host, port) for port in ports]
    await server.start()
    logger.info("router for %s, and for a gateway at %s", settings.model, options.listen)
    try:
        await serving.serve(router, listeners, stop)
    finally:
        await server.stop(grace=1)


async def _with_envoy(
    router: Router,
    endpoints: envoy.Endpoints,
    server: grpc.aio.Server,
    folder: Path,
    stop: Stopping,
    threads: int,
) -> None:
    settings, config = router.settings, folder / "envoy.json"
    written = envoy.bootstrap(
        settings, endpoints=folder / "endpoints.json", picker=folder / "picker.sock"
    )
    config.write_text(json.dumps(written, indent=1))
    process = None
    try:
        await router.open()
        await endpoints.settle()
        # First Envoy: a process that serves gRPC should start no other. Its requests wait.
        process = await envoy.start(config, threads=threads)
        await server.start()
        asked = f"{'https' if settings.tls_cert_file else 'http'}://{settings.host}:{settings.port}"
        logger.info("router for %s on %s, by Envoy as in %s", settings.model, asked, config)
        await first_of(stop.asked.wait(), process.wait())
        if not stop.asked.is_set():
            raise ConfigError(
                f"Envoy ended with status {process.returncode}: its last lines say why, as that a "
                f"port is taken; its configuration was {config}"
            )
        await router.drain()
    finally:
        if process is not None and process.returncode is None:
            process.terminate()
            await process.wait()
        await server.stop(grace=1)
        await router.close()


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM: answers that have begun end first, for ``drain_s`` at most.

    Returns:
        0 after a clean stop, 2 if the settings are wrong or Envoy cannot serve.
    """
    parser = argparse.ArgumentParser(
        prog="python -m epd_portable.router.picker",
        description="Serve like the router, with Envoy in front that carries the bytes.",
    )
    add = parser.add_argument
    add(
        "--settings",
        required=True,
        metavar="JSON",
        help="settings as JSON, or @FILE of a file with them, as for python -m epd_portable.router",
    )
    add(
        "--listen",
        metavar="ADDRESS",
        default="",
        help="serve the endpoint picker protocol for a gateway of your own, at unix:PATH, or at "
        "HOST:PORT with --gateway-ca or --gateway-network, and HTTP at the host and port of the "
        "settings; without it an Envoy is started",
    )
    known = parser.add_mutually_exclusive_group()
    known.add_argument(
        "--gateway-ca",
        type=Path,
        metavar="FILE",
        help="certificates in PEM that sign the gateway's, which it must show at HOST:PORT; this "
        "end shows tls_cert_file of the settings, or one that signs itself",
    )
    known.add_argument(
        "--gateway-network",
        type=ipaddress.ip_network,
        action="append",
        default=[],
        metavar="NETWORK",
        help="who asks from this network, such as 10.1.0.0/16, may do so at HOST:PORT without a "
        "certificate; may be repeated",
    )
    threads = "worker threads of the Envoy that is started (default: one per core)"
    add("--threads", type=int, default=os.cpu_count() or 1, help=threads)
    folder = "folder for envoy.json and endpoints.json (default: a temporary one)"
    add("--folder", type=Path, help=folder)
    options = parser.parse_args(argv)
    log.configure()
    serving.raise_file_limit()
    try:
        settings = load_settings(options.settings)
        with contextlib.ExitStack() as held:
            where: Path = options.folder or Path(
                held.enter_context(tempfile.TemporaryDirectory(prefix="epd-picker-"))
            )
            where.mkdir(parents=True, exist_ok=True, mode=0o700)
            uvloop.run(serve(settings, where, options))
    except EPDError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
