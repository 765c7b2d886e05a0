"""Bounded admission around an application on a real server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import Response, StreamingResponse

from epd_portable.media.limits import estimated_pixels
from epd_portable.scheduling.admission import AdmissionLimits
from epd_portable.vllm_plugin.admission import AdmissionMiddleware, count_items, outline_of
from epd_portable.wire.messages import LOAD_HEARTBEAT_S, LOAD_PATH, LoadReport
from tests.integration.serving import DEADLINE_S, Received, Serving, StandIn

CHAT = "/v1/chat/completions"
ITEM = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class Instance:
    """A stand-in behind the middleware, which answers when it is told to."""

    def __init__(self, items: int, nbytes: int, *, answers: bool = False) -> None:
        self.go_on = asyncio.Event()
        self.engine = StandIn("encode-0", "encode", self._behave)
        self.registry = CollectorRegistry()
        self.serving = Serving(
            AdmissionMiddleware(
                self.engine.serving._app,
                limits=AdmissionLimits(items=items, nbytes=nbytes),
                answers=answers,
                registry=self.registry,
            )
        )
        self.client = httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False)

    async def _behave(self, received: Received) -> Response:
        await self.go_on.wait()
        return Response(received.raw)

    def body(self, items: int = 1, padding: int = 0, **more: Any) -> bytes:
        content = [ITEM] * items + [{"type": "text", "text": "x" * padding}]
        return json.dumps({"messages": [{"role": "user", "content": content}], **more}).encode()

    async def post(self, body: Any, path: str = CHAT) -> httpx.Response:
        return await self.client.post(self.serving.url + path, content=body)

    def begin(self, body: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.post(body))

    async def arrived(self, number: int) -> None:
        await self.engine.until(lambda engine: len(engine.received) >= number)

    def held(self) -> tuple[float | None, float | None]:
        return (
            self.registry.get_sample_value("epd_encode_queued_items"),
            self.registry.get_sample_value("epd_encode_queued_bytes"),
        )

    async def until_empty(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.held() != (0, 0):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def instance(
    *, items: int = 4, nbytes: int = 1 << 20, answers: bool = False
) -> AsyncIterator[Instance]:
    made = Instance(items, nbytes, answers=answers)
    await made.serving.start()
    try:
        yield made
    finally:
        await made.client.aclose()
        await made.serving.stop()


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_more_items_than_may_be_queued_are_answered_429_and_served_later() -> None:
    async with instance(items=3) as e:
        first = e.begin(e.body(items=2))
        await e.arrived(1)
        refused = await e.post(e.body(items=2))
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) >= 50
        error = refused.json()["error"]
        assert error["type"] == "rate_limit_error"
        assert error["code"] == "encode_queue_full"
        assert "2 of at most 3 items are queued" in error["message"]
        assert "instances.encode.max_queued_items" in error["message"]
        e.go_on.set()
        assert (await first).content == e.body(items=2)
        assert (await e.post(e.body(items=2))).status_code == 200
        await e.until_empty()
        refusals = {"limit": "items"}
        assert e.registry.get_sample_value("epd_encode_refused_requests_total", refusals) == 1


@pytest.mark.parametrize("params", [None, [], {"transfers": [{"transfer_id": "t"}]}])
async def test_who_answers_requests_too_bounds_its_encode_jobs_alone(params: Any) -> None:
    job = {"ec_transfer_params": {"transfers": [{"consumer": "tcp://127.0.0.1:1"}]}}
    async with instance(items=2, nbytes=1000, answers=True) as e:
        first = e.begin(e.body(items=2, **job))
        await e.arrived(1)
        assert e.held() == (2, len(e.body(items=2, **job)))
        refused = [await e.post(e.body(**job)), await e.post(e.body(items=3, **job))]
        assert [each.status_code for each in refused] == [429, 413]
        own = e.body(items=5, padding=2000, ec_transfer_params=params)
        asked = e.begin(own)
        await e.arrived(2)
        e.go_on.set()
        assert (await asked).content == own
        assert (await first).status_code == 200
        await e.until_empty()


async def test_a_full_instance_answers_before_it_reads_and_keeps_the_connection() -> None:
    async with instance(nbytes=1 << 20) as e:
        first = e.begin(e.body(padding=900_000))
        await e.arrived(1)
        for _ in range(3):
            refused = await e.post(e.body(padding=900_000))
            assert refused.status_code == 429
            assert "bytes are queued" in refused.json()["error"]["message"]
        assert e.held()[1] == len(e.body(padding=900_000))
        e.go_on.set()
        assert (await first).status_code == 200
        assert (await e.post(e.body(padding=900_000))).status_code == 200
        assert len(e.engine.received) == 2


async def test_a_body_of_unknown_length_is_counted_as_it_comes_and_cut_off() -> None:
    async with instance(nbytes=1000) as e:
        e.go_on.set()
        assert (await e.post(pieces(e.body(), b" " * 100))).status_code == 200
        refused = await e.post(pieces(e.body(), *[b" " * 100] * 50))
        assert refused.status_code == 413
        assert refused.json()["error"]["code"] == "request_exceeds_queue"
        await e.until_empty()
        assert len(e.engine.received) == 1


async def test_a_body_of_unknown_length_is_refused_when_it_has_come_whole_too() -> None:
    async with instance(nbytes=1000) as e:
        body = e.body(padding=1000)
        url = httpx.URL(e.serving.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: e\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode() + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        async with asyncio.timeout(DEADLINE_S):
            assert b" 413 " in await reader.readline()
        writer.close()
        await e.until_empty()


@pytest.mark.parametrize(
    ("extra", "key"), [({"items": 5}, "max_queued_items"), ({"padding": 3000}, "max_queued_bytes")]
)
async def test_a_request_that_could_never_be_queued_is_refused_for_good(
    extra: dict[str, int], key: str
) -> None:
    async with instance(items=4, nbytes=2000) as e:
        refused = await e.post(e.body(**extra))
        assert refused.status_code == 413
        assert "retry-after" not in refused.headers
        assert key in refused.json()["error"]["message"]
        await e.until_empty()


async def test_a_client_that_leaves_gives_everything_back() -> None:
    async with instance(items=2) as e:
        leaving = e.begin(e.body(items=2))
        await e.arrived(1)
        leaving.cancel()
        await e.until_empty()

        async def endless() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.Event().wait()

        halfway = e.begin(endless())

        async with asyncio.timeout(DEADLINE_S):
            while e.held()[1] != 1:
                await asyncio.sleep(0.01)
        halfway.cancel()
        await e.until_empty()
        assert len(e.engine.received) == 1


async def test_an_answer_counts_until_its_last_piece() -> None:
    async with instance(items=1) as e:
        more = asyncio.Event()

        async def streaming(received: Received) -> Response:
            async def parts() -> AsyncIterator[bytes]:
                yield b"first"
                await more.wait()
                yield b"last"

            return StreamingResponse(parts())

        e.engine.behaviour = streaming
        async with e.client.stream("POST", e.serving.url + CHAT, content=e.body()) as answer:
            chunks = answer.aiter_raw()
            assert await anext(chunks) == b"first"
            assert (await e.post(e.body())).status_code == 429
            more.set()
            assert [chunk async for chunk in chunks] == [b"last"]
        await e.until_empty()


async def test_health_and_whatever_generates_nothing_is_never_refused() -> None:
    async with instance(items=1) as e:
        busy = e.begin(e.body())
        await e.arrived(1)
        assert (await e.post(e.body())).status_code == 429
        for path in ("/health", "/v1/models"):
            assert (await e.client.get(e.serving.url + path)).status_code == 200
        other = asyncio.create_task(e.post(b"{}", path="/tokenize"))
        await e.arrived(2)
        e.go_on.set()
        assert (await other).status_code == 200
        await busy


@pytest.mark.parametrize(
    ("body", "items"),
    [
        (
            {"messages": [{"content": [ITEM, {"type": "text"}, {"type": "video_url"}]}] * 2},
            4,
        ),
        ({"input": [{"content": [{"type": "input_image"}, {"type": "input_audio"}]}]}, 2),
        ({"messages": [{"content": ["text", ITEM, "text", ITEM]}]}, 2),
        ({"messages": [{"content": "text"}], "input": "text"}, 0),
        ({"messages": [{"role": "assistant", "content": None}]}, 0),
        ({"messages": "no list"}, 0),
        ([], 0),
    ],
)
def test_items_are_counted_in_every_form_of_a_conversation(body: Any, items: int) -> None:
    assert count_items(outline_of(json.dumps(body).encode())) == items


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_body_that_is_none_has_no_items(body: bytes) -> None:
    assert count_items(outline_of(body)) == 0


async def test_how_busy_it_is_is_told_when_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = "epd_portable.vllm_plugin.admission.LOAD_HEARTBEAT_S"
    async with instance() as e:
        content = ["text", ITEM, ITEM]
        body = json.dumps({"messages": [{"role": "user", "content": content}]})
        pixels = 2 * estimated_pixels("image", len(json.dumps(ITEM["image_url"])))

        async def load(**known: int) -> LoadReport:
            response = await e.client.get(e.serving.url + LOAD_PATH, params=known)
            assert response.status_code == 200
            return msgspec.json.decode(response.content, type=LoadReport)

        assert await load() == LoadReport(items=0, pixels=0)
        began = time.monotonic()
        assert await load(items=0, pixels=0) == LoadReport(items=0, pixels=0)
        assert time.monotonic() - began >= LOAD_HEARTBEAT_S / 2
        # From now on only news is told.
        monkeypatch.setattr(heartbeat, 10 * DEADLINE_S)
        news = asyncio.create_task(load(items=0, pixels=0))
        asked = e.begin(body.encode())
        assert await news in (LoadReport(items=1, pixels=0), LoadReport(items=2, pixels=pixels))
        await e.arrived(1)
        assert await load(items=1, pixels=0) == LoadReport(items=2, pixels=pixels)
        news = asyncio.create_task(load(items=2, pixels=pixels))
        # It is open when there is news; if not, the answer is the same.
        await asyncio.sleep(0.1)
        e.go_on.set()
        await asked
        assert await news == LoadReport(items=0, pixels=0)
