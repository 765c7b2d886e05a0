"""Bounded admission in the API server of an instance that encodes for others.

``--middleware epd_portable.vllm_plugin.admission.AdmissionMiddleware``: vLLM puts the class around
its application (0.26 to 0.33), outside its own middleware. Limits come with the instance's
settings; those of media have been checked by the router already. Where requests are answered, too,
encode jobs alone are counted and refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import anyio
import msgspec
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from epd_portable.media.limits import estimated_pixels
from epd_portable.placement.replies import DRAIN_TIMEOUT_S, error_body
from epd_portable.scheduling.admission import Admission, AdmissionLimits, Refusal, Visit
from epd_portable.vllm_plugin.instance_token import endpoint, instance_of
from epd_portable.wire.messages import LOAD_HEARTBEAT_S, LOAD_PATH, LoadReport
from epd_portable.wire.params import is_encode_job

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

_UNTIL_CONFIGURED = AdmissionLimits(items=0, nbytes=0)


class _Part(msgspec.Struct):
    """One part of a message; the values of its media stay as they are in the body."""

    type: str = ""
    image_url: msgspec.Raw = msgspec.Raw()
    video_url: msgspec.Raw = msgspec.Raw()


class _Message(msgspec.Struct):
    content: list[_Part | str] | str | None = None


class Outline(msgspec.Struct):
    """What is read of a body: messages of chat or the input of responses, settings, parameters."""

    messages: list[_Message] = []
    input: list[_Message] | str = []
    ec_transfer_params: msgspec.Raw = msgspec.Raw()
    mm_processor_kwargs: msgspec.Raw = msgspec.Raw()
    media_io_kwargs: msgspec.Raw = msgspec.Raw()

    def parts(self) -> Iterator[_Part]:
        """Yield each content part that is an object."""
        for messages in (self.messages, self.input):
            for message in messages if isinstance(messages, list) else ():
                if isinstance(message.content, list):
                    yield from (part for part in message.content if isinstance(part, _Part))

    def is_encode_job(self) -> bool:
        """Return whether its items are to be encoded, and nothing is to be answered."""
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            return is_encode_job(msgspec.json.decode(self.ec_transfer_params, type=dict[str, Any]))
        return False


class AdmissionMiddleware(Collector):
    """Answers 429 with ``Retry-After`` where the instance would have to queue more than it may.

    A request is counted from its arrival to the end of its answer, however it ends. No more bytes
    of a body are kept than were counted before, unless the body has to tell whether it is a job.

    Args:
        limits: Of the queue; ``None`` reads them from the instance's settings.
        answers: Whether it answers requests, too; from the same settings.
        registry: Where the counts are exposed.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: AdmissionLimits | None = None,
        answers: bool = False,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._app = app
        self._admission = Admission(limits or _UNTIL_CONFIGURED)
        self._is_configured = limits is not None
        self._answers = answers
        self._refused = dict.fromkeys(KEYS, 0)
        self._news = asyncio.Event()
        registry.register(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request (ASGI)."""
        method, path = endpoint(scope)
        if (method, path) == ("GET", LOAD_PATH):
            await (await self._load(Request(scope, receive)))(scope, receive, send)
            return
        if method != "POST" or path not in COUNTED_PATHS:
            await self._app(scope, receive, send)
            return
        self._configure(scope)
        visit = Visit()
        try:
            admitted = await self._admit(visit, Request(scope, receive))
            if isinstance(admitted, Refusal):
                self._refused[admitted.what] += 1
                await _response(admitted)(scope, receive, send)
            else:
                await self._app(scope, replay(admitted, receive), send)
        except ClientDisconnect:
            logger.debug("a client left before its request was complete")
        finally:
            self._admission.leave(visit, now_s=time.monotonic())
            self._changed()

    async def _admit(self, visit: Visit, request: Request) -> bytes | Refusal:
        """Return the whole body, or why the request is refused."""
        read = await (request.body() if self._answers else self._read(visit, request))
        if isinstance(read, Refusal):
            return read
        outline = outline_of(read)
        if self._answers and not outline.is_encode_job():
            return read
        items = max(count_items(outline), 1) - visit.items
        if refusal := self._add_part(visit, items=items, nbytes=len(read) - visit.nbytes):
            return refusal
        self._admission.found(visit, pixels_of(outline))
        self._changed()
        return read

    async def _read(self, visit: Visit, request: Request) -> bytes | Refusal:
        """Return the whole body, counted before it is kept."""
        announced = request.headers.get("content-length", "")
        known = int(announced) if announced.isdecimal() else 0
        arriving = request.stream()
        if refusal := self._add_part(visit, items=1, nbytes=known):
            return await _drained(request, arriving, refusal)
        pieces: list[bytes] = []
        async for piece in arriving:
            if not announced and (refusal := self._add_part(visit, nbytes=len(piece))):
                pieces.clear()
                return await _drained(request, arriving, refusal)
            pieces.append(piece)
        return b"".join(pieces)

    async def _load(self, request: Request) -> Response:
        """Answer how busy the instance is, as soon as that is not what the router knows."""
        asked = request.query_params
        known = (asked.get("items", ""), asked.get("pixels", ""))
        with anyio.move_on_after(LOAD_HEARTBEAT_S):
            while known == (str(self._admission.items), str(self._admission.pixels)):
                await self._news.wait()
        load = LoadReport(items=self._admission.items, pixels=self._admission.pixels)
        return Response(msgspec.json.encode(load), headers={"content-type": "application/json"})

    def _changed(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _configure(self, scope: Scope) -> None:
        """Read the instance's settings with the first request: the server has them by then."""
        if not self._is_configured:
            instance = instance_of(scope)
            self._admission = Admission(
                AdmissionLimits(items=instance.max_queued_items, nbytes=instance.max_queued_bytes)
            )
            self._answers = bool(instance.control_address)
            self._is_configured = True

    def _add_part(self, visit: Visit, *, items: int = 0, nbytes: int = 0) -> Refusal | None:
        return self._admission.add_part(visit, items=items, nbytes=nbytes, now_s=time.monotonic())

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


def outline_of(body: bytes) -> Outline:
    """Return what is read of a body; nothing of one that the engine does not accept."""
    try:
        return msgspec.json.decode(body, type=Outline)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Outline()


def count_items(outline: Outline) -> int:
    """Return how many media items a body holds."""
    return sum(any(name in part.type for name in MEDIA) for part in outline.parts())


def pixels_of(outline: Outline) -> int:
    """Return about how many pixels the media of a body have, by their bytes."""
    return sum(
        estimated_pixels("image", len(memoryview(part.image_url)))
        + estimated_pixels("video", len(memoryview(part.video_url)))
        for part in outline.parts()
    )


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that begins with the body."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return unread.pop() if unread else await receive()

    return replayed


async def _drained(request: Request, rest: AsyncIterator[bytes], refusal: Refusal) -> Refusal:
    """Drop the rest of a body, unless its sender waits for leave to send it."""
    if request.headers.get("expect", "").lower() != "100-continue":
        with anyio.move_on_after(DRAIN_TIMEOUT_S):
            async for _ in rest:
                pass
    return refusal


def _response(refusal: Refusal) -> Response:
    key = f"instances.encode.{KEYS[refusal.what]}"
    headers = {"content-type": "application/json"}
    if refusal.wait_s is None:
        status, code = 413, "request_exceeds_queue"
        message = (
            f"this request has {refusal.wanted} {refusal.what}, and this instance queues "
            f"at most {refusal.limit} in all: send less at once, or raise {key}"
        )
    else:
        status, code = 429, "encode_queue_full"
        message = (
            f"{refusal.queued} of at most {refusal.limit} {refusal.what} are queued at this "
            f"instance, and this request has {refusal.wanted} more: try again in "
            f"{refusal.wait_s:.2g} s, or raise {key}"
        )
        headers["retry-after"] = str(math.ceil(refusal.wait_s))
        # The router reads milliseconds: whole seconds are a long time here.
        headers["retry-after-ms"] = str(math.ceil(1000 * refusal.wait_s))
    return Response(error_body(message, status=status, code=code), status, headers)
