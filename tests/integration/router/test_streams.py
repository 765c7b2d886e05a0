"""Answers that come in pieces: what clients get of those that end early, or fail at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from starlette.responses import Response, StreamingResponse

from epd_portable.wire.messages import NotWanted
from tests.integration.router.conftest import Build
from tests.integration.router.stand_in import (
    DEADLINE_S,
    Behaviour,
    Received,
    StandIn,
    forever,
    in_turn,
    silent,
    stream,
    streamed,
)
from tests.integration.router.test_requests import RED, TEXT

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
EVENT = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
CREATED = b'event: response.created\ndata: {"type": "response.created", "sequence_number": 4}\n\n'
LONG = b'data: {"long": "' + b"a" * (3 << 20)
LAST = {
    CHAT: b"data: [DONE]\n\n",
    MESSAGES: b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
    RESPONSES: b'event: response.completed\ndata: {"type": "response.completed"}\n\n',
}


def body(*parts: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": list(parts) or "Hello"}]
    return {"input": prompt, "messages": prompt, "max_tokens": 9, "stream": True}


def cut(instance: StandIn, *pieces: bytes) -> Behaviour:
    """An instance that breaks its connections after the beginning of a stream."""

    async def beginning() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
            await asyncio.sleep(0.05)
        instance.serving.drop_connections()
        await asyncio.Event().wait()

    return stream(beginning)


@pytest.mark.parametrize(
    ("path", "pieces", "whole"),
    [
        (CHAT, [EVENT], EVENT),
        (CHAT, [EVENT + EVENT[:20]], EVENT),
        (CHAT, [EVENT, LONG], EVENT + LONG[:100]),
        (RESPONSES, [CREATED], CREATED),
        (MESSAGES, [EVENT], EVENT),
    ],
    ids=["chat", "within an event", "within a long event", "responses", "messages"],
)
async def test_a_stream_that_is_cut_ends_with_the_error_event_of_its_interface(
    build: Build, path: str, pieces: Sequence[bytes], whole: bytes
) -> None:
    t = await build(encoders=0)
    t.pd.behaviour = cut(t.pd, *pieces)
    response = await t.client.post(path, json=body())
    assert response.status_code == 200 and response.content.startswith(whole)
    *_, event, rest = response.content.split(b"\n\n")
    # Nothing of an event that has not come whole, unless that is too long to be kept.
    assert response.content == whole + event + b"\n\n" or len(response.content) > 1 << 20
    name, _, data = event.rpartition(b"data: ")
    assert response.content.count(b"instance_lost" if path != MESSAGES else b"api_error") == 1
    assert rest == b"" and name == (b"" if path == CHAT else b"event: error\n")
    error = json.loads(data)
    if path == RESPONSES:
        assert error["sequence_number"] == 5 and error["param"] is None
        assert (error["type"], error["code"]) == ("error", "instance_lost")
    elif path == MESSAGES:
        assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    else:
        assert error["error"]["code"] == "instance_lost"
    assert b"incomplete" in data


@pytest.mark.parametrize("path", LAST)
@pytest.mark.parametrize("together", [True, False])
async def test_a_stream_that_is_cut_after_its_last_event_is_whole(
    build: Build, path: str, together: bool
) -> None:
    t = await build(encoders=0)
    pieces = [EVENT + LAST[path]] if together else [EVENT, LAST[path]]
    t.pd.behaviour = cut(t.pd, *pieces)
    assert (await t.client.post(path, json=body())).content == EVENT + LAST[path]


async def test_a_stream_at_an_instance_that_hangs_ends_with_an_error(build: Build) -> None:
    t = await build(encoders=0, probe_timeout_s=0.5)

    async def pieces() -> AsyncIterator[bytes]:
        yield EVENT
        t.pd.health = silent
        await asyncio.Event().wait()

    t.pd.behaviour = stream(pieces)
    response = await t.chat(TEXT, stream=True)
    assert response.content.startswith(EVENT) and b"instance_lost" in response.content


ANTHROPICS_ERROR = streamed(
    b"event: ", b'error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}\n\n'
)


@pytest.mark.parametrize(
    "begun", [b"", EVENT[:10], None], ids=["headers", "half an event", "error"]
)
async def test_a_stream_of_which_a_client_has_nothing_is_asked_for_elsewhere(
    build: Build, begun: bytes | None
) -> None:
    """Engines send a stream's headers at once, and the first token when the items are there."""
    t = await build(pds=2)

    async def first(received: Received) -> Response:
        if begun is None:
            return await ANTHROPICS_ERROR(received)
        [asked] = [pd for pd in t.pds if pd.received]
        return await cut(asked, begun)(received)

    in_turn(t.pds, first, streamed(EVENT + LAST[CHAT]))
    response = await t.client.post(MESSAGES if begun is None else CHAT, json=body(TEXT))
    assert (response.status_code, response.content) == (200, EVENT + LAST[CHAT])
    assert [len(pd.received) for pd in t.pds] == [1, 1]
    assert await t.metric('epd_router_fallbacks_total{phase="answer",fallback="retried"}') == 1


async def test_a_streamed_request_that_fails_at_once_gets_a_status_and_ends_its_items(
    build: Build,
) -> None:
    t = await build(encoding=forever)

    async def pieces() -> AsyncIterator[bytes]:
        yield b'data: {"er'
        await asyncio.sleep(0)
        yield b'ror": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n'
        try:
            await asyncio.Event().wait()
        finally:
            await t.pd.count_abort()

    t.pd.behaviour = stream(pieces)
    response = await t.chat(RED, stream=True)
    assert response.status_code == 400
    assert response.json() == {"error": {"message": "too long", "code": 400}}
    await t.pd.until(lambda pd: pd.aborted == 1)
    _, message = await t.control.receive()
    assert isinstance(message, NotWanted)
    await t.encoders[0].until(lambda encoder: encoder.aborted == 1)


LONG_ANSWER = b'{"choices": "' + b"a" * (2 << 20)


@pytest.mark.parametrize(
    ("pieces", "content_type"),
    [
        ([EVENT.replace(b"\n", b"\r\n")] * 2, "text/event-stream"),
        ([LONG_ANSWER, b'"}'], "application/json"),
    ],
    ids=["events with carriage returns", "a long answer"],
)
async def test_an_answer_passes_as_it_comes(
    build: Build, pieces: Sequence[bytes], content_type: str
) -> None:
    t = await build(encoders=0)
    seen = asyncio.Event()

    async def one_by_one() -> AsyncIterator[bytes]:
        yield pieces[0]
        await asyncio.wait_for(seen.wait(), DEADLINE_S)
        yield pieces[1]

    async def generate(received: Received) -> Response:
        length = {"content-length": str(sum(map(len, pieces)))}
        return StreamingResponse(one_by_one(), media_type=content_type, headers=length)

    t.pd.behaviour = generate
    got = b""
    async with t.client.stream("POST", CHAT, json=body()) as response:
        if content_type == "application/json":
            assert response.headers["content-length"] == str(sum(map(len, pieces)))
        async for piece in response.aiter_raw():
            got += piece
            seen.set()
    assert got == b"".join(pieces)
