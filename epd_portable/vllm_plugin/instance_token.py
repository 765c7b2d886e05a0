"""The token that every instance's own HTTP server asks for.

``--middleware epd_portable.vllm_plugin.instance_token.TokenMiddleware``: vLLM puts the class around
its application (0.26 to 0.33), and the last one that is named outermost. It is independent of
vLLM's own ``--api-key``, which guards some of the addresses, comes with clients' requests and
reaches vLLM as before.
"""

from __future__ import annotations

import hmac

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from epd_portable.config.instance import InstanceConfig
from epd_portable.config.secret import INSTANCE_TOKEN_HEADER, Secret
from epd_portable.errors import ConfigError
from epd_portable.placement.replies import error_body

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""Open to ``GET`` without a token: probes and Prometheus."""

_HEADER = INSTANCE_TOKEN_HEADER.encode()
_POLICY_VIOLATION = 1008


def instance_of(scope: Scope) -> InstanceConfig:
    """Return the instance's settings, from the configuration of vLLM's API server once it runs.

    Raises:
        ConfigError: It has none.
    """
    settings = getattr(scope["app"].state, "vllm_config", None)
    transfer = getattr(settings, "ec_transfer_config", None)
    if transfer is None:
        raise ConfigError(
            "this server has no --ec-transfer-config, which names the instance and its "
            "secret_file: give it, or leave out the --middleware of epd_portable"
        )
    return InstanceConfig.parse(dict(transfer.ec_connector_extra_config))


def endpoint(scope: Scope) -> tuple[str, str]:
    """Return the method and the path that are asked for; both empty for what is no HTTP request."""
    if scope["type"] != "http":
        return "", ""
    path: str = scope["path"]
    return scope["method"], path.removeprefix(scope.get("root_path", ""))


class TokenMiddleware:
    """Answers 401 to requests without `Secret.instance_token`, see `OPEN_PATHS`.

    The server does not start where its instance names no secret. What is behind never sees the
    token, so that nothing there can log it.

    Args:
        secret: ``None`` reads the instance's file when the server starts.
    """

    def __init__(self, app: ASGIApp, *, secret: Secret | None = None) -> None:
        self._app = app
        self._token = None if secret is None else secret.instance_token().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request (ASGI)."""
        if scope["type"] == "lifespan":
            try:
                self._expected(scope)
            except ConfigError as error:
                await receive()
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            await self._app(scope, receive, send)
            return
        shown = [value for name, value in scope["headers"] if name.lower() == _HEADER]
        # Each of them is compared, however many there are: none says how far it was right.
        right = [hmac.compare_digest(value, self._expected(scope)) for value in shown]
        method, path = endpoint(scope)
        if right != [True] and not (method == "GET" and path in OPEN_PATHS):
            await _refuse(scope, receive, send)
            return
        headers = [pair for pair in scope["headers"] if pair[0].lower() != _HEADER]
        await self._app({**scope, "headers": headers}, receive, send)

    def _expected(self, scope: Scope) -> bytes:
        if self._token is None:
            secret = Secret.read(instance_of(scope).secret_file)
            self._token = secret.instance_token().encode()
        return self._token


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        return
    body = error_body(
        "this is an instance behind a router: ask the router, or show in the header "
        f"{INSTANCE_TOKEN_HEADER} what Secret.read(FILE).instance_token() returns for its "
        "secret_file",
        status=401,
        code="unauthorized",
    )
    # The rest of the body is not read.
    headers = {"content-type": "application/json", "connection": "close"}
    await Response(body, 401, headers)(scope, receive, send)
