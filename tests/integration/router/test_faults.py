"""What goes wrong at the router's borders: instances that hang, cut or die slowly, and clients that
send slowly, take slowly, or send what is no request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.responses import Response

from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import (
    CHAT,
    JSON,
    Received,
    StandIn,
    answer,
    forever,
    refuse,
    stream,
)
from tests.integration.router.test_requests import RED, TEXT
from tests.integration.router.test_streams import EVENT


def hang(instance: StandIn) -> None:
    """Let an instance answer nothing any more, probes neither; its connections stay."""

    async def silent() -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    instance.behaviour = forever
    instance.health = silent


async def opened(t: Topology) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", t.router.port)


# Instances.


async def test_requests_at_an_instance_that_hangs_go_to_another_one(build: Build) -> None:
    t = await build(encoders=0, pds=2, probe_timeout_s=0.1)

    async def first_hangs(received: Received) -> Response:
        if len(t.pds[0].received) + len(t.pds[1].received) == 1:
            hang(next(each for each in t.pds if each.received))
            return await forever(received)
        return await answer(received)

    for pd in t.pds:
        pd.behaviour = first_hangs
    response = await asyncio.wait_for(t.chat(TEXT), 8)
    assert response.status_code == 200
    assert await t.metric('epd_router_fallbacks_total{phase="answer",fallback="retried"}') == 1


async def test_one_cut_connection_is_no_death(build: Build) -> None:
    t = await build()
    second = asyncio.Event()

    async def generate(received: Received) -> Response:
        if received.params and not second.is_set():
            await second.wait()
        return await answer(received)

    t.pd.behaviour = generate
    picture = asyncio.create_task(t.chat(RED))
    await t.pd.until(lambda pd: bool(pd.received))
    await t.encoders[0].until(lambda encoder: bool(encoder.received))
    await asyncio.sleep(0.05)
    # All connections to the encoder break, and nothing else.
    t.encoders[0].serving.drop_connections()
    await asyncio.sleep(0.3)
    second.set()
    assert (await picture).status_code == 200
    assert len(t.encoders[0].received) == 1
    health = (await t.health()).json()["instances"]["encode-0"]
    assert health["state"] == "up"


async def test_an_engine_that_dies_slowly_gets_no_more_than_its_failures(build: Build) -> None:
    t = await build(encoders=0, pds=2, probe_interval_s=60)
    t.pds[0].behaviour = refuse(500, "EngineDeadError")

    answers = [await t.chat(TEXT) for _ in range(40)]

    assert [each.status_code for each in answers] == [200] * 40
    # Without ejection half of all would be tried there, or all, for it is never busy.
    assert len(t.pds[0].received) < 15


async def test_a_500_of_the_only_instance_is_passed_on(build: Build) -> None:
    t = await build(encoders=0)
    t.pd.behaviour = refuse(500, "no memory")
    response = await t.chat(TEXT)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "no memory"
    assert len(t.pd.received) == 1


# Clients.


@pytest.mark.parametrize("name", ["x-request-id", "traceparent", "x-other"])
async def test_a_header_that_is_not_ascii_does_no_harm(build: Build, name: str) -> None:
    t = await build(encoders=0)
    reader, writer = await opened(t)
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    writer.write(
        CHAT + name.encode() + b": caf\xe9\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    assert name == "x-request-id" or name not in t.pd.received[0].headers


async def test_a_body_that_does_not_come_is_refused_in_time(build: Build) -> None:
    t = await build(encoders=0, body_timeout_s=0.3)
    reader, writer = await opened(t)
    writer.write(CHAT + b"content-length: 100\r\n\r\n{")
    answered = await asyncio.wait_for(reader.read(), 3)
    assert answered.startswith(b"HTTP/1.1 408")
    assert b"body_timeout" in answered
    writer.close()
    assert (await t.chat(TEXT)).status_code == 200


async def test_unfinished_bodies_are_bounded_in_sum(build: Build) -> None:
    size = 1 << 20
    t = await build(encoders=0, max_body_bytes=size, max_bodies_bytes=3 * size)
    head = CHAT + b"content-length: %d\r\n\r\n" % size
    unfinished = [await opened(t) for _ in range(3)]
    for _, writer in unfinished:
        writer.write(head + b" " * (size - 1000))
        await writer.drain()
    await asyncio.sleep(0.2)

    refused = await t.client.post("/v1/chat/completions", content=b" " * (size // 2), headers=JSON)

    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "too_many_bytes"
    assert "retry-after" in refused.headers
    assert (await t.chat(TEXT)).status_code == 200
    for _, writer in unfinished:
        writer.close()
    await asyncio.sleep(0.2)
    # What is not held any more is free again.
    later = await t.client.post("/v1/chat/completions", content=b" " * (size // 2), headers=JSON)
    assert later.status_code == 400


async def test_a_client_that_takes_nothing_is_given_up(build: Build) -> None:
    t = await build(encoders=0, send_timeout_s=0.5)

    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield EVENT * 1000
            await asyncio.sleep(0)

    t.pd.behaviour = stream(pieces)
    _, writer = await opened(t)
    body = b'{"stream": true, "messages": [{"role": "user", "content": "hi"}]}'
    writer.write(CHAT + b"content-length: %d\r\n\r\n" % len(body) + body)
    await t.until_metric("epd_router_requests_in_flight", 1)

    async def ended() -> None:
        while await t.metric("epd_router_requests_in_flight"):
            await asyncio.sleep(0.02)

    await asyncio.wait_for(ended(), 5)
    writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/chat/completions HTTP/9.9\r\n\r\n",
        CHAT + b"content-length: -1\r\n\r\n",
        CHAT + b"content-length: 99999999999999999999\r\n\r\n",
        CHAT + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
        CHAT + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /%ff%00 HTTP/1.1\r\nhost: \xff\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 5_000 + b"\r\n",
        bytes(range(256)) * 4,
    ],
    ids=range(11),
)
async def test_what_is_no_request_gets_no_500_and_hangs_nobody(build: Build, data: bytes) -> None:
    t = await build(encoders=0)
    reader, writer = await opened(t)
    writer.write(data)
    writer.write_eof()
    answered = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert not answered.startswith(b"HTTP/1.1 5")
    assert (await t.chat(TEXT)).status_code == 200
