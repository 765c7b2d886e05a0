"""What a router's sockets do with clients that send too much, or take nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import anyio
import psutil
import pytest
from starlette.responses import Response, StreamingResponse

from epd_portable.router.server import Router
from epd_portable.router.serving import Stopping, listen, serve
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import CHAT, Received


@pytest.fixture
async def port(build: Build) -> AsyncIterator[tuple[Topology, int]]:
    t = await build(encoders=0, send_timeout_s=0.5)
    listener = listen("127.0.0.1", 0)
    stop = Stopping()
    serving = asyncio.create_task(serve(Router(t.settings), [listener], stop))
    yield t, listener.getsockname()[1]
    stop.ask()
    await serving


async def test_headers_are_limited(port: Any) -> None:
    _, number = port
    reader, writer = await asyncio.open_connection("127.0.0.1", number)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n")
    with anyio.fail_after(5), pytest.raises(ConnectionError):
        for index in range(1000):
            writer.write(b"x-%d: " % index + b"a" * 65536 + b"\r\n")
            await writer.drain()
        await reader.read()
    writer.close()


async def test_many_small_requests_on_one_connection_are_no_large_one(port: Any) -> None:
    _, number = port
    reader, writer = await asyncio.open_connection("127.0.0.1", number)
    head = b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 60_000 + b"\r\n\r\n"
    for _ in range(6):
        writer.write(head)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await reader.readuntil(b"}}")
    writer.close()


async def test_a_client_that_takes_nothing_loses_its_connection(port: Any) -> None:
    t, number = port

    async def endless(received: Received) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"data: " + b"a" * 65536 + b"\n\n"
                await asyncio.sleep(0.001)

        return StreamingResponse(pieces(), media_type="text/event-stream")

    t.pd.behaviour = endless
    body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", number))
        client.sendall(CHAT + b"content-length: %d\r\n\r\n" % len(body) + body)
        ours = client.getsockname()[1]
        await t.pd.until(lambda pd: len(pd.received) == 1)
        with anyio.fail_after(10):
            while any(
                connection.laddr.port == number
                and connection.raddr
                and connection.raddr.port == ours
                for connection in psutil.Process().net_connections("tcp")
            ):
                await asyncio.sleep(0.1)
