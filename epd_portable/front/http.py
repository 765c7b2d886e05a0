"""HTTP around vLLM's application: keys, bounds, placement headers, instances, access lines.

``--middleware epd_portable.front.http.FrontMiddleware``, the last, so outermost. All
that vLLM's server has is left to it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import Counter
from typing import Any, cast, get_args

import anyio
import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from epd_portable.config.api_keys import ApiKeys
from epd_portable.config.roles import DUTIES, ENCODES, TAKES_KV
from epd_portable.config.secret import SignatureCheck
from epd_portable.errors import ConfigError, RequestError
from epd_portable.front.client import SplitClient
from epd_portable.front.engines import Engines
from epd_portable.front.exchange import LEFT_OUT, FrontExchange, exchange
from epd_portable.front.headers import of_response, read_hints
from epd_portable.front.media_urls import UrlFetcher, fetching_by
from epd_portable.front.request import StoppedError
from epd_portable.log import access_log
from epd_portable.media.limits import check_settings
from epd_portable.placement.instances import EngineSettings, InstanceState
from epd_portable.placement.profiles.selection_types import SESSION_HEADER
from epd_portable.responses import RETRY_AFTER_S, body_timeout, error_reply
from epd_portable.vllm_plugin import media_bounds

logger = logging.getLogger(__name__)
_NAMES_MEDIA = "/inference/v1/"
"""Path of vLLM's endpoints at which the client names the media."""

_FORMS = {"application/x-www-form-urlencoded", "multipart/form-data", "text/plain", ""}
"""Types that a page may send to another origin without a preflight (Fetch standard); also none."""
_CONTROL = "/epd/instances"
_RESPONDS_WITHIN_S = 30.0
_MAX_CONTROL_BYTES = 64 << 10
MAX_NAME_BYTES = 4096
"""Longer names of models and sessions in a body are ignored."""
_OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""Paths that need no API key."""


class FrontMiddleware:
    """Serves state and control of engines; bounds, places and logs the requests of clients."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._client: SplitClient | None = None
        self._held_bytes = 0
        self._keys: ApiKeys | None = None
        self._log: logging.Logger | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request (ASGI)."""
        if self._client is None and hasattr(scope["app"].state, "engine_client"):
            client = scope["app"].state.engine_client.engine_core
            try:
                self._open(client)
            except ConfigError as error:
                await receive()
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
        if self._client is not None:
            media_bounds.begin_request(self._front.media)
        if scope["type"] == "websocket" and (
            not self._has_key(scope, FrontExchange()) or self._origin_problem(scope)
        ):
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http" or self._client is None:
            await self._app(scope, receive, send)
        elif (
            (scope["method"], scope["path"]) == ("GET", "/health")
            or (scope["path"] == "/metrics" and len(self._settings.sockets) > 1)
            or f"{scope['path']}/".startswith(f"{_CONTROL}/")
        ):
            try:
                response = await self._answer(scope, receive)
            except RequestError as error:
                response = _refusal(error, scope["path"])
            except ClientDisconnect:
                response = Response(status_code=400)
            await response(scope, receive, send)
        else:
            await self._pass_on(scope, receive, send)

    def _open(self, client: SplitClient) -> None:
        """Take over the settings; called with the first event of the server, its start.

        Raises:
            ConfigError: The access log cannot be written, or the API keys cannot be read.
        """
        front = client.settings.front
        if front.access_log is not None:
            self._log = access_log(front.access_log)
        if front.api_keys_file is not None:
            self._keys = ApiKeys(front.api_keys_file)
        fetcher = UrlFetcher(front.media.urls, front.max_bodies_bytes, client.metrics)
        media_bounds.bound_process(front.media, fetching_by(fetcher))
        self._client = client
        self._metrics = client.metrics
        self._settings, self._front = client.settings, front
        self._signatures = SignatureCheck(client.secret)
        REGISTRY.register(cast(Any, client.metrics.registry))

    # About engines.

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        assert self._client is not None
        method, path = scope["method"], scope["path"]
        name, _, verb = path.removeprefix(_CONTROL).strip("/").partition("/")
        engines = self._client.engines
        known = name in engines.by_name
        if path == "/metrics":
            return Response(await engines.page(), media_type=CONTENT_TYPE_LATEST)
        if path == "/health":
            return await self._health(engines)
        if (method, verb) == ("GET", "health") and known:
            # The launcher sends the request; an engine has no server of its own.
            within_s = _RESPONDS_WITHIN_S
            with contextlib.suppress(KeyError, ValueError):
                within_s = min(within_s, float(Request(scope).query_params["within_s"]))
            well = await engines.by_name[name].responds(within_s)
            return Response(status_code=200 if well else 503)
        body = await self._control_body(scope, receive) if method == "POST" else b""
        self._check_signature(scope, body)
        if (method, name) == ("POST", ""):
            return await self._join(engines, body)
        if (method, name) == ("GET", ""):
            return JSONResponse({"front": _here(), "instances": await engines.seen()})
        if known and (method, verb) == ("DELETE", ""):
            if engines.by_name[name].follower is None:
                text = f"instance {name!r} belongs to this front: stop its launcher, or drain it"
                raise RequestError(text, status=409, code="not_joined")
            method, verb = "POST", "leave"
        if known and method == "POST" and verb in ("drain", "resume", "leave"):
            seen = await engines.seen(verb, name)
            return JSONResponse(next(each for each in seen if each["name"] == name))
        return Response(status_code=404)

    async def _health(self, engines: Engines) -> Response:
        """200 if a request can be served."""
        try:
            seen = await engines.seen()
        except RequestError:
            seen = []  # An API server that starts, or has ended.
        up = [each for each in seen if each["state"] == "up"]
        assert self._client is not None
        answers = any(DUTIES[each["role"]] == "decode" for each in up)
        ready = answers and not self._client.is_draining
        states = Counter(each["state"] for each in seen)
        counts = {state: states[state] for state in get_args(InstanceState)}
        status = "ok" if ready else "unavailable"
        return JSONResponse({"status": status, "counts": counts}, 200 if ready else 503)

    async def _join(self, engines: Engines, body: bytes) -> Response:
        try:
            settings = msgspec.json.decode(body, type=EngineSettings)
        except msgspec.MsgspecError as error:
            text = f"instance to register: {error}"
            raise RequestError(text, status=400, code="invalid_instance") from error
        roles = {each.instance.role for each in engines.by_name.values()}
        is_used = settings.role in ENCODES or not roles.isdisjoint(TAKES_KV)
        reached = settings.url and (settings.control or settings.role == "encode")
        if DUTIES[settings.role] == "decode" or not (is_used and reached):
            text = (
                f"instance {settings.name!r} of role {settings.role} at {settings.url!r}: a front "
                "takes encode engines at tcp://host:port, and with decode instances engines that "
                "prefill; others run on its machine"
            )
            raise RequestError(text, status=400, code="invalid_instance")
        if settings.url.startswith("plain+") and not self._settings.trusted_network:
            text = (
                f"instance {settings.name!r} takes jobs without encryption "
                "(transfer.trusted_network): set that at this front as well, or at neither"
            )
            raise RequestError(text, status=400, code="invalid_instance")
        new = await engines.join(settings)
        seen = await engines.seen()
        shown = next((each for each in seen if each["name"] == settings.name), {})
        return JSONResponse({"front": _here(), **shown}, 201 if new else 200)

    async def _control_body(self, scope: Scope, receive: Receive) -> bytes:
        pieces: list[bytes] = []
        with anyio.move_on_after(self._settings.body_timeout_s):
            async for piece in Request(scope, receive).stream():
                pieces.append(piece)
                if sum(map(len, pieces)) > _MAX_CONTROL_BYTES:
                    text = f"the body is longer than {_MAX_CONTROL_BYTES} bytes"
                    raise RequestError(text, status=413, code="request_too_large")
            return b"".join(pieces)
        raise body_timeout(self._settings.body_timeout_s)

    def _check_signature(self, scope: Scope, body: bytes) -> None:
        """Return if a request is signed by a holder of the secret; `RequestError` if not."""
        given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        target = scope["raw_path"].decode("latin-1")
        self._signatures.check(given, scope["method"], target, body)

    # Requests of clients.

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let vLLM serve it; its body is read on demand, so after keys and paths."""
        begun, one = time.monotonic(), FrontExchange()
        exchange.set(one)
        held: Message | None = None

        async def bounded() -> Message:
            if not one.unread:
                return await receive()
            one.unread = False
            try:
                body = await self._read(Request(scope, receive), one)
                self._take(_fields_of(body), one)
            except (RequestError, ClientDisconnect) as failure:
                one.failure = failure
                raise
            return {"type": "http.request", "body": body, "more_body": False}

        async def noted(message: Message) -> None:
            nonlocal held
            if one.failure is not None and not one.begun:
                return  # vLLM's response to the failure is not sent.
            if message["type"] == "http.response.start":
                if message["status"] == 500 and self._stops():
                    one.refuse(StoppedError())
                    return
                one.status = message["status"]
                given = dict(message["headers"]).get(b"x-request-id", b"")
                one.request_id = given.decode("latin-1")
                held = message  # Streams begin before vLLM has sent anything to an engine.
                return
            if held is not None:
                start, held, one.begun = held, None, True
                one.first_at = time.monotonic()
                added = [*of_response(one)] if one.hints else []
                if one.left_out:
                    added.append((LEFT_OUT, str(len(one.left_out))))
                encoded = [(n.encode(), v.encode("latin-1", "replace")) for n, v in added]
                await send({**start, "headers": [*start["headers"], *encoded]})
            one.nbytes_out += len(message.get("body", b""))
            await send(message)

        try:
            if not self._has_key(scope, one):
                await _UNAUTHORIZED(scope, receive, noted)
                return
            try:
                if (problem := self._origin_problem(scope)) is not None:
                    raise problem
                if _NAMES_MEDIA in scope["path"]:  # Before it there may be a root path.
                    raise RequestError(
                        f"{scope['method']} {scope['path'][:256]} is not served: clients would "
                        "name media, under which others would find them: send a prompt or messages",
                        status=404,
                        code="not_served",
                    )
                self._place(scope, one)
                await self._app(scope, bounded, noted)
            except (RequestError, ClientDisconnect) as failure:
                one.failure = one.failure or failure
            except Exception as error:
                if one.begun or not self._stops():
                    raise
                logger.warning("a request failed while this server was stopped", exc_info=error)
                one.refuse(StoppedError())
            if one.begun or one.failure is None:
                return
            if isinstance(one.failure, RequestError):
                one.begun, held = True, None
                await _refusal(one.failure, scope["path"])(scope, receive, noted)
            else:
                logger.debug("the client disconnected before its request was complete")
        except Exception:
            if not one.begun:
                one.status = 500  # Starlette responds so, outside of this.
            raise
        finally:
            self._held_bytes -= one.nbytes
            self._metrics.requests.labels(str(one.status)).inc()
            if self._log is not None:
                self._log.info(_line_of(scope, one, begun))

    def _stops(self) -> bool:
        """Return whether what renders and generates has ended, or is about to."""
        return self._client is not None and self._client.is_draining

    def _has_key(self, scope: Scope, one: FrontExchange) -> bool:
        """Return whether a request may be served, and note its key."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._keys is None or scope.get("method") == "OPTIONS" or path in _OPEN_PATHS:
            return True
        one.key = self._keys.find(Headers(scope=scope))
        return bool(one.key)

    def _origin_problem(self, scope: Scope) -> RequestError | None:
        """Return why a page of another origin may not send a request without a preflight."""
        headers, allowed = Headers(scope=scope), self._front.cors_origins
        origin = headers.get("origin")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        may_change = scope["type"] == "websocket" or scope["method"] == "POST"
        if origin is None or kind not in _FORMS or not may_change or {"*", origin} & {*allowed}:
            return None
        return RequestError(
            f"pages of origin {origin[:128]!r} may not send this without a preflight: add the "
            "origin to front.cors_origins",
            status=403,
            code="origin_not_allowed",
        )

    async def _read(self, request: Request, one: FrontExchange) -> bytes:
        front, timeout_s, pieces = self._front, self._settings.body_timeout_s, []
        with anyio.move_on_after(timeout_s):
            async for piece in request.stream():
                one.nbytes += len(piece)
                self._held_bytes += len(piece)
                if one.nbytes > front.max_body_bytes:
                    raise RequestError(
                        f"the body is beyond front.max_body_bytes of {front.max_body_bytes}: send "
                        "less, or raise it",
                        status=413,
                        code="request_too_large",
                    )
                if self._held_bytes > front.max_bodies_bytes:
                    raise RequestError(
                        "bodies of open requests take the memory of front.max_bodies_bytes of "
                        f"{front.max_bodies_bytes}: try again later, or raise it",
                        status=503,
                        code="busy",
                        retry_after_s=RETRY_AFTER_S,
                    )
                pieces.append(piece)
            return b"".join(pieces)
        raise body_timeout(timeout_s)

    def _place(self, scope: Scope, one: FrontExchange) -> None:
        assert self._client is not None
        headers = Headers(scope=scope)
        one.session = headers.get(SESSION_HEADER, "")
        if (keys := self._client.gateway_keys) is not None:
            one.hints = read_hints(headers, keys, self._client.engines.pool)

    def _take(self, fields: _Fields, one: FrontExchange) -> None:
        """Take in the fields of a body, and refuse settings that enlarge media."""
        one.model = _text_of(fields.model)
        one.session = one.session or _text_of(fields.session_id)
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            if memoryview(raw := getattr(fields, name)).nbytes:
                check_settings(self._front.media, name, raw)


def _here() -> str:
    """Return the name of this incarnation of the front: its process group, for every server."""
    return str(os.getsid(0))


class _Fields(msgspec.Struct):
    """Fields of a body that are read here; others are skipped, and media are not decoded."""

    model: msgspec.Raw = msgspec.Raw(b'""')
    session_id: msgspec.Raw = msgspec.Raw(b'""')
    mm_processor_kwargs: msgspec.Raw = msgspec.Raw()
    media_io_kwargs: msgspec.Raw = msgspec.Raw()


def _fields_of(body: bytes) -> _Fields:
    """Return the fields of a body; none for a body that vLLM cannot read."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(body, type=_Fields)
    # vLLM reads more than JSON: other encodings, a byte order mark, NaN.
    with contextlib.suppress(ValueError, RecursionError):
        read = json.loads(body)
        if isinstance(read, dict):
            given = {name: read[name] for name in _Fields.__struct_fields__ if name in read}
            return _Fields(**{n: msgspec.Raw(json.dumps(v)) for n, v in given.items()})
    return _Fields()


def _text_of(raw: msgspec.Raw) -> str:
    """Return a string, or a number as its digits; empty for what is no name."""
    if len(memoryview(raw)) > MAX_NAME_BYTES:
        return ""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = msgspec.json.decode(raw)
        return str(found) if isinstance(found, str | int | float) else ""
    return ""


def _line_of(scope: Scope, one: FrontExchange, begun: float) -> str:
    line = {
        "time": time.time(),
        "request_id": one.request_id,
        "client": one.key.hex()[:8],
        "method": scope["method"],
        "path": scope["path"],
        "status": one.status,
        "bytes_in": one.nbytes,
        "bytes_out": one.nbytes_out,
        "first_byte_s": round(one.first_at - begun, 4) if one.first_at else 0,
        "duration_s": round(time.monotonic() - begun, 4),
        "engine": one.engine,
        "prefill": one.prefilled.name if one.prefilled else "",
        "tokens": one.tokens,
        "items": [*one.items.values()],
    }
    needed = {"status", "duration_s"}
    return json.dumps({name: each for name, each in line.items() if each or name in needed})


_UNAUTHORIZED = JSONResponse({"error": "Unauthorized"}, 401, {"www-authenticate": "Bearer"})
"""vLLM's response to a request without a valid key, with the header that HTTP requires."""


def _refusal(error: RequestError, path: str) -> Response:
    reply = error_reply(error, path)
    # Of what is late nothing more is waited for.
    closes = {"connection": "close"} if reply.status == 408 else {}
    return Response(reply.body, reply.status, {**reply.headers, **closes})
