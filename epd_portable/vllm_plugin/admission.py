"""Bounded admission in the API server of an encode instance.

``--middleware epd_portable.vllm_plugin.admission.AdmissionMiddleware``: vLLM puts the class around
its application (0.26 to 0.33), outside its own middleware. Limits come with the instance's
settings; those of media have been checked by the router already.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import anyio
import msgspec
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from epd_portable.delivery.replies import DRAIN_TIMEOUT_S, error_body
from epd_portable.errors import RequestError
from epd_portable.media.formats import Modality
from epd_portable.media.limits import (
    MediaLimits,
    check_item,
    check_processor_settings,
    check_request,
)
from epd_portable.scheduling.admission import Admission, AdmissionLimits, Refusal, Visit
from epd_portable.vllm_plugin.instance_token import instance_of
from epd_portable.wire.messages import LOAD_HEARTBEAT_S, LOAD_PATH, LoadReport

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
MAX_URL_HEAD = 256
"""Longest beginning of a data URL, up to its data, that is looked at."""

_UNTIL_CONFIGURED = AdmissionLimits(items=0, nbytes=0)
_ESCAPE = re.compile(rb"\\")


class _Part(msgspec.Struct):
    type: str = ""
    image_url: msgspec.Raw = msgspec.Raw()
    video_url: msgspec.Raw = msgspec.Raw()
    audio_url: msgspec.Raw = msgspec.Raw()
    input_audio: msgspec.Raw = msgspec.Raw()


class _Message(msgspec.Struct):
    content: list[_Part] | str | None = None


class Outline(msgspec.Struct):
    """What is read of a body: messages of chat, or the input of responses."""

    messages: list[_Message] = []
    input: list[_Message] | str = []
    mm_processor_kwargs: msgspec.Raw = msgspec.Raw()
    media_io_kwargs: msgspec.Raw = msgspec.Raw()

    def parts(self) -> Iterator[tuple[str, _Part]]:
        """Yield each content part with its place."""
        spoken = [("messages", self.messages)]
        if isinstance(self.input, list):
            spoken.append(("input", self.input))
        for name, messages in spoken:
            for index, message in enumerate(messages):
                if isinstance(message.content, list):
                    for place, part in enumerate(message.content):
                        yield f"{name}[{index}].content[{place}]", part


class _Url(msgspec.Struct):
    url: msgspec.Raw = msgspec.Raw()


class _Clip(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw()


class AdmissionMiddleware(Collector):
    """Answers 429 with ``Retry-After`` where the instance would have to queue more than it may.

    A request is counted from its arrival to the end of its answer, however it ends. No more bytes
    of a body are kept than were counted before. Media that would become larger than they may are
    refused as the router refuses them, before vLLM decodes any.

    Args:
        app: What is protected.
        limits: Of the queue; with ``media_limits``.
        media_limits: ``None`` reads both from the instance's settings.
        registry: Where the counts are exposed.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: AdmissionLimits | None = None,
        media_limits: MediaLimits | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._app = app
        self._admission = Admission(limits or _UNTIL_CONFIGURED)
        self._media_limits = media_limits
        self._refused = dict.fromkeys((*KEYS, "media"), 0)
        self._news = asyncio.Event()
        registry.register(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request (ASGI)."""
        if _is_question(scope):
            await (await self._load(Request(scope, receive)))(scope, receive, send)
            return
        if not _is_counted(scope):
            await self._app(scope, receive, send)
            return
        media_limits = self._configured(scope)
        visit = Visit()
        try:
            request = Request(scope, receive)
            answer = await self._admit(visit, request, media_limits)
            if isinstance(answer, Response):
                await answer(scope, receive, send)
            else:
                await self._app(scope, _replay(answer, receive), send)
        except ClientDisconnect:
            logger.debug("a client left before its request was complete")
        finally:
            self._admission.leave(visit, now_s=time.monotonic())
            self._changed()

    async def _admit(
        self, visit: Visit, request: Request, media_limits: MediaLimits
    ) -> bytes | Response:
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
            outline = outline_of(body)
            refusal = self._take(visit, items=max(count_items(outline), 1) - 1)
            if refusal is None:
                try:
                    pixels = check_media(media_limits, outline)
                except RequestError as error:
                    self._refused["media"] += 1
                    return _refused(error)
                self._admission.found(visit, pixels)
                self._changed()
                return body
        elif request.headers.get("expect", "").lower() != "100-continue":
            pieces.clear()
            with anyio.move_on_after(DRAIN_TIMEOUT_S):
                async for _ in request.stream():
                    pass
        self._refused[refusal.what] += 1
        return _response(refusal)

    async def _load(self, request: Request) -> Response:
        """Answer how busy the instance is, as soon as that is not what the router knows."""
        asked = request.query_params
        told = (asked.get("items", ""), asked.get("pixels", ""))
        with anyio.move_on_after(LOAD_HEARTBEAT_S):
            while told == (str(self._admission.items), str(self._admission.pixels)):
                await self._news.wait()
        load = LoadReport(items=self._admission.items, pixels=self._admission.pixels)
        return Response(msgspec.json.encode(load), headers={"content-type": "application/json"})

    def _changed(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _configured(self, scope: Scope) -> MediaLimits:
        """Read the instance's settings with the first request: the server has them by then."""
        if self._media_limits is None:
            instance = instance_of(scope)
            self._media_limits = instance.media_limits
            self._admission = Admission(
                AdmissionLimits(items=instance.max_queued_items, nbytes=instance.max_queued_bytes)
            )
        return self._media_limits

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
            "Requests answered 429, 413 or 400, by the limit that they met.",
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
    return sum(any(name in part.type for name in MEDIA) for _, part in outline.parts())


def check_media(limits: MediaLimits, outline: Outline) -> int:
    """Check what the media of a body become when they are decoded; return their pixels.

    URLs that hold no data are left to vLLM: nothing of theirs is here yet.

    Raises:
        RequestError: 413 or 400; as the router's.
    """
    processing = check_processor_settings(
        limits, outline.mm_processor_kwargs, outline.media_io_kwargs
    )
    pixels = 0
    for where, part in outline.parts():
        for modality, field, value in _items(part):
            media_type, text = value
            place = f"{where}.{field}"
            pixels += check_item(limits, modality, media_type, text, place, processing)
    check_request(limits, pixels)
    return pixels


def _items(part: _Part) -> Iterator[tuple[Modality, str, tuple[str, memoryview]]]:
    """Yield modality, field, and media type with base64 text of each item in a part."""
    urls: tuple[tuple[Modality, str, msgspec.Raw], ...] = (
        ("image", "image_url", part.image_url),
        ("video", "video_url", part.video_url),
        ("audio", "audio_url", part.audio_url),
    )
    for modality, field, raw in urls:
        if _opens(raw, b"{"):
            raw = _field(raw, _Url).url
        url = _text(raw)
        head = bytes(url[:MAX_URL_HEAD])
        comma = head.find(b",")
        if head[:5].lower() == b"data:":
            if comma < 0:
                raise RequestError(
                    f"{field}: no ',' in the first {MAX_URL_HEAD} bytes of its data URL",
                    status=400,
                    code="invalid_data_url",
                )
            media_type = head[5:comma].partition(b";")[0].decode("latin-1")
            yield modality, field, (media_type, url[comma + 1 :])
    if _opens(part.input_audio, b"{"):
        yield "audio", "input_audio", ("", _text(_field(part.input_audio, _Clip).data))


T = TypeVar("T", _Url, _Clip)


def _field(raw: msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return kind()


def _opens(raw: msgspec.Raw, bracket: bytes) -> bool:
    return bytes(memoryview(raw)[:1]) == bracket


def _text(raw: msgspec.Raw) -> memoryview:
    """Return the bytes of a JSON string: those of the body where it holds no escapes."""
    view = memoryview(raw)
    if not _opens(raw, b'"'):
        return view[:0]
    inner = view[1:-1]
    if _ESCAPE.search(inner):
        return memoryview(msgspec.json.decode(raw, type=str).encode("utf-8", "surrogatepass"))
    return inner


def _is_counted(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) in COUNTED_PATHS


def _is_question(scope: Scope) -> bool:
    asked = (scope["type"], scope.get("method"), scope.get("path"))
    return asked == ("http", "GET", LOAD_PATH)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that begins with the body."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return unread.pop() if unread else await receive()

    return replayed


def _refused(error: RequestError) -> Response:
    body = error_body(str(error), status=error.status, code=error.code)
    return Response(body, error.status, {"content-type": "application/json"})


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
