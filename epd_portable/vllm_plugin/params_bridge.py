"""``ec_transfer_params`` in responses of API servers that do not know the field (vLLM before 0.26).

``--middleware epd_portable.vllm_plugin.params_bridge.ParamsMiddleware``. Such a server returns
``kv_transfer_params``; the field travels in these. Streamed responses do not return it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from epd_portable.wire.params import FIELD

_OUT_OF_ENGINE = "kv_transfer_params"


class ParamsMiddleware:
    """Moves the field of JSON responses to its own name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request (ASGI)."""
        posted = scope["type"] == "http" and scope["method"] == "POST"
        await self._app(scope, receive, _moving_back(send) if posted else send)


def answer_body(body: bytes) -> bytes:
    """Return a response's JSON with the field taken out of ``kv_transfer_params``."""
    fields = _fields(body)
    inner = _fields(bytes(fields.get(_OUT_OF_ENGINE, b"null")))
    params = inner.pop(FIELD, None)
    if params is None:
        return body
    fields[_OUT_OF_ENGINE] = msgspec.Raw(msgspec.json.encode(inner or None))
    fields[FIELD] = params
    return msgspec.json.encode(fields)


def _moving_back(send: Send) -> Send:
    """Return a ``send`` that passes a response on, JSON in one piece."""
    start: Message | None = None
    pieces: list[bytes] = []

    async def passed_on(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            kind = Headers(raw=message.get("headers", [])).get("content-type", "")
            if kind.partition(";")[0].strip() == "application/json":
                start = message
                return
        elif start is not None and message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))
            if message.get("more_body"):
                return
            body = answer_body(b"".join(pieces))
            headers = MutableHeaders(raw=list(start.get("headers", [])))
            headers["content-length"] = str(len(body))
            await send({**start, "headers": headers.raw})
            start, message = None, {**message, "body": body}
        await send(message)

    return passed_on


def _fields(body: bytes) -> dict[str, Any]:
    """Return the members of a JSON object, their values as they are written; none of other JSON."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw] | None) or {}
    except msgspec.DecodeError:
        return {}
