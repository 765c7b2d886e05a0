"""The router as an endpoint picker, with ``envoy`` in its settings, or ``--listen``.

Envoy takes clients' requests in and carries answers; this process is asked about each request, over
Envoy's protocol for external processors (`ext_proc`), as the endpoint pickers of the Gateway API
inference extension are. It reads the request, chooses as the router does, starts encode jobs, has
a prompt computed by a prefill instance, rewrites the request and names the one that answers it: a
`Consultation`. Here are the ports at which it can be asked.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import json
import logging
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc.aio

from epd_portable.config.roles import Duty
from epd_portable.config.routing import PICKER_PORT
from epd_portable.errors import ConfigError
from epd_portable.media.addresses import in_url
from epd_portable.router import envoy, ext_proc, serving
from epd_portable.router.consultation import Picker
from epd_portable.router.ext_proc import HealthCheckRequest, HealthCheckResponse
from epd_portable.router.server import Router
from epd_portable.router.serving import Stopping, first_of
from epd_portable.router.settings import RouterSettings

logger = logging.getLogger("epd_portable.router")


def listen_for_gateway(
    server: grpc.aio.Server, settings: RouterSettings, address: str, ca: Path | None
) -> None:
    """Listen where only a gateway can ask, encrypted beyond a UNIX socket.

    Args:
        ca: File of certificates that sign the gateway's; without it networks of the settings ask.

    Raises:
        ConfigError: Anybody could ask, or the address or a file cannot be used.
    """
    is_socket = address.startswith("unix:")
    if is_socket == bool(ca or settings.gateway_networks):
        raise ConfigError(
            f"--listen {address}: answers of the picker tell the token of the instances; "
            "listen at unix:PATH, where the socket's permissions say who may ask, or at "
            "HOST:PORT with --gateway-ca FILE, or with the gateway's networks as router.envoy"
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
    now = datetime.datetime.now(datetime.UTC)
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


async def serve(settings: RouterSettings, options: argparse.Namespace, stop: Stopping) -> None:
    """Answer Envoy until the stop, or until Envoy ends.

    Args:
        settings: Of the router; its host and port are those of the Envoy that is started, or, for a
            gateway of others, where this process itself answers as a router does.

    Raises:
        ConfigError: An address or a file of the settings cannot be used, or Envoy ended.
    """
    given: Path | None = options.folder
    with nullcontext(given) if given else tempfile.TemporaryDirectory("", "epd-picker-") as place:
        folder = Path(place)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        address = options.listen
        if settings.gateway_networks and not address:
            address = f"{in_url(settings.host)}:{PICKER_PORT}"
        if address:
            listen_for_gateway(server, settings, address, options.gateway_ca)
        else:
            server.add_insecure_port(f"unix:{folder}/picker.sock")
        router = Router(settings)
        # Hops that answer elsewhere have prompts computed here.
        duties: set[Duty] = {"answer", "prefill"} if settings.hop_keys_file else {"answer"}
        endpoints = envoy.Endpoints(folder / "endpoints.json", router.instances, duties)
        networks = [ipaddress.ip_network(each) for each in settings.gateway_networks]
        picker = Picker(router, endpoints, networks)
        server.add_generic_rpc_handlers((picker.service(), health_service(router)))
        if not address:
            return await _with_envoy(router, endpoints, server, folder, stop, options.threads)
        listeners = serving.listen_at(settings)
        await server.start()
        logger.info("router for %s, and for a gateway at %s", settings.model, address)
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
