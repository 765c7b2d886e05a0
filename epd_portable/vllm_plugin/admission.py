"""Bounded admission in the API server of an encode instance.

``--middleware epd_portable.vllm_plugin.admission.AdmissionMiddleware``: vLLM puts the class around
its application (0.26 to 0.33), outside its own middleware. Limits come from the environment,
because vLLM passes nothing else to a middleware.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from epd_portable.envs import EPD_MAX_QUEUED_BYTES, EPD_MAX_QUEUED_ITEMS
from epd_portable.router.incoming import ClientGoneError, drain
from epd_portable.router.replies import error_body
from epd_portable.scheduling.admission import Admission, AdmissionLimits, Refusal, Visit

logger = logging.getLogger(__name__)

COUNTED_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/inference/v1/generate",
        "/invocations",
    }
)
"""Endpoints that put requests into the engine. Health, metrics and the rest are never refused."""

KEYS = {"items": "max_queued_items", "bytes": "max_queued_bytes"}
MEDIA = ("image", "audio", "video")


class _Part(msgspec.Struct):
    type: str = ""


class _Message(msgspec.Struct):
    content: list[_Part] | str | None = None


class _Body(msgspec.Struct):
    """What is read of a body: messages of chat, or the input of responses."""

    messages: list[_Message] = []
    input: list[_Message] | str = []


class AdmissionMiddleware(Collector):
    """Answers 429 with ``Retry-After`` where the instance would have to queue more than it may.

    A request is counted from its arrival to the end of its answer, however it ends. No more bytes
    of a body are kept than were counted before.

    Args:
        app: What is protected.
        limits: ``None`` reads them from the environment.
        registry: Where the counts are exposed.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: AdmissionLimits | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._app = app
        self._admission = Admission(
            limits
            or AdmissionLimits(items=EPD_MAX_QUEUED_ITEMS.get(), nbytes=EPD_MAX_QUEUED_BYTES.get())
        )
        self._refused = dict.fromkeys(KEYS, 0)
        registry.register(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request (ASGI)."""
        if not _is_counted(scope):
            await self._app(scope, receive, send)
            return
        visit = Visit()
        try:
            request = Request(scope, receive)
            answer = await self._admit(visit, request)
            if isinstance(answer, Response):
                await answer(scope, receive, send)
            else:
                await self._app(scope, _replay(answer, receive), send)
        except (ClientDisconnect, ClientGoneError):
            logger.debug("a client left before its request was complete")
        finally:
            self._admission.leave(visit, now_s=time.monotonic())

    async def _admit(self, visit: Visit, request: Request) -> bytes | Response:
        """Return the whole body, or why the request is refused."""
        announced = request.headers.get("content-length", "")
        known = int(announced) if announced.isdecimal() else 0
        refusal = self._take(visit, items=1, nbytes=known)
        pieces: list[bytes] = []
        size = 0
        if refusal is None:
            async for piece in request.stream():
                size += len(piece)
                if not announced:
                    refusal = self._take(visit, nbytes=len(piece))
                    if refusal is not None:
                        break
                pieces.append(piece)
        if refusal is None:
            body = b"".join(pieces)
            refusal = self._take(visit, items=max(count_items(body), 1) - 1)
            if refusal is None:
                return body
        elif request.headers.get("expect", "").lower() != "100-continue":
            pieces.clear()
            await drain(request.receive)
        self._refused[refusal.what] += 1
        return _response(refusal)

    def _take(self, visit: Visit, *, items: int = 0, nbytes: int = 0) -> Refusal | None:
        return self._admission.take(visit, items=items, nbytes=nbytes, now_s=time.monotonic())

    def collect(self) -> Iterable[Metric]:
        """Yield what is queued and what was refused (Prometheus)."""
        yield GaugeMetricFamily(
            "epd_encode_queued_items", "Items queued or encoded.", self._admission.items
        )
        yield GaugeMetricFamily(
            "epd_encode_queued_bytes", "Bytes of their requests.", self._admission.nbytes
        )
        refused = CounterMetricFamily(
            "epd_encode_refused_requests",
            "Requests answered 429 or 413, by the limit that they met.",
            labels=("limit",),
        )
        for what, count in self._refused.items():
            refused.add_metric((what,), count)
        yield refused


def count_items(body: bytes) -> int:
    """Return how many media items a body holds; 0 if it is not one that the engine accepts."""
    try:
        read = msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0
    messages = read.messages + (read.input if isinstance(read.input, list) else [])
    return sum(
        any(name in part.type for name in MEDIA)
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
    )


def _is_counted(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) in COUNTED_PATHS


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that begins with the body."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return unread.pop() if unread else await receive()

    return replayed


def _response(refusal: Refusal) -> Response:
    key = f"instances.encode.{KEYS[refusal.what]}"
    headers = {"content-type": "application/json"}
    if refusal.wait_s is None:
        status, code = 413, "request_exceeds_queue"
        message = (
            f"this request has {refusal.wanted} {refusal.what}, and this encode instance queues "
            f"at most {refusal.limit} in all: send less at once, or raise {key}"
        )
    else:
        status, code = 429, "encode_queue_full"
        message = (
            f"{refusal.queued} of at most {refusal.limit} {refusal.what} are queued at this encode "
            f"instance, and this request has {refusal.wanted} more: try again in "
            f"{refusal.wait_s:.2g} s, or raise {key}"
        )
        headers["retry-after"] = str(math.ceil(refusal.wait_s))
        # For those who understand it, such as the router; whole seconds are a long time here.
        headers["retry-after-ms"] = str(math.ceil(1000 * refusal.wait_s))
    return Response(error_body(message, status=status, code=code), status, headers)
