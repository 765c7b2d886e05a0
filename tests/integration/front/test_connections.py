"""Connections of the front by uvicorn's parser: slow and large heads, and ambiguous requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("vllm")

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from epd_portable.front import connections

pytestmark = pytest.mark.needs_vllm

DEADLINE_S = 60.0


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with the method, the path and the body that arrived."""
    body = await Request(scope, receive).body()
    text = f"{scope['method']} {scope['path']} {body.decode('latin-1')}"
    await PlainTextResponse(text)(scope, receive, send)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Port of a server as vLLM starts it in the front."""
    connections.install()
    config = uvicorn.Config(echo, port=0, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


async def exchange(port: int, *pieces: bytes, ends: bool = True) -> bytes:
    """Send pieces, and return what arrives until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if ends:
            writer.write_eof()
        return await asyncio.wait_for(reader.read(), DEADLINE_S)
    return b""


POST = b"POST /a HTTP/1.1\r\nhost: x\r\n"
AMBIGUOUS = {
    "two lengths": POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "length and chunks": POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": POST + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
    "negative length": POST + b"content-length: -1\r\n\r\n",
    "signed length": POST + b"content-length: +1\r\n\r\na",
    "hexadecimal length": POST + b"content-length: 0x1\r\n\r\na",
    "list of lengths": POST + b"content-length: 1, 1\r\n\r\na",
    "chunks not last": POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "invalid chunk size": POST + b"transfer-encoding: chunked\r\n\r\nz\r\n",
    "negative chunk size": POST + b"transfer-encoding: chunked\r\n\r\n-1\r\n",
    "large chunk size": POST + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "chunk without an end": POST + b"transfer-encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
    "space before colon": POST + b"content-length : 1\r\n\r\na",
    "folded header": POST + b"x: y\r\n content-length: 1\r\n\r\n",
    "bare line feed": b"POST /a HTTP/1.1\nhost: x\ncontent-length: 1\n\na",
    "null in a header": POST + b"x: a\0b\r\n\r\n",
    "no method": b"\0\1\2\r\n\r\n",
    "other version": b"GET /a HTTP/9.9\r\n\r\n",
    "version 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


async def test_ambiguous_request_smuggles_no_second_request(port: int) -> None:
    for name, data in AMBIGUOUS.items():
        smuggled = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
        got = await exchange(port, data + smuggled)
        assert b"smuggled" not in got, (name, got)
        assert got.startswith(b"HTTP/1.1 400"), (name, got)


async def test_slow_head_is_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.2)
    for begin in (b"", b"GET", b"GET / HTTP/1.1\r\nhost: x\r\n"):
        got = await exchange(port, begin, ends=False)
        assert got.startswith(b"HTTP/1.1 408"), begin
    # A further request of one connection.
    whole = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
    got = await exchange(port, whole, b"GET", ends=False)
    assert got.count(b"HTTP/1.1 200") == 1 and got.count(b"HTTP/1.1 408") == 1


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET / HTTP/1.1\r\nx: ", b"y" * 4096),
        (b"GET /", b"a" * 4096),
        (b"GET / HTTP/1.1\r\n", b"x: y\r\n" * 500),
        (POST + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", b"x: y\r\n" * 500),
        (POST + b"transfer-encoding: chunked\r\n\r\n1;", b"x" * 4096),
    ],
    ids=["value", "path", "headers", "trailers", "chunk extension"],
)
async def test_large_head_is_closed(port: int, begin: bytes, piece: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        writer.write(begin)
        while not reader.at_eof() and sent < 100 * connections.MAX_HEAD_BYTES:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
            await asyncio.sleep(0)
    assert sent < 100 * connections.MAX_HEAD_BYTES


async def test_large_and_small_bodies_arrive(port: int) -> None:
    large = b"x" * (1 << 20)
    head = POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(large)
    assert (await exchange(port, head + large)).endswith(large)
    chunks = b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n"
    head = POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert (await exchange(port, head + chunks)).endswith(b"x" * 50_000)
