"""Connections of the front: slow and large heads, ambiguous requests, clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from epd_portable.front import connections
from epd_portable.front.http import FrontMiddleware
from epd_portable.front.server import Front
from epd_portable.responses import MAX_HEAD_BYTES
from tests.certificates import make_certificate, served_certificate
from tests.integration.front.played_front import Engine, within
from tests.kit.ambiguous import AMBIGUOUS, POST, SMUGGLED
from tests.waiting import until_async

DEADLINE_S = 60.0
GO_ON, BEGUN = asyncio.Event(), asyncio.Event()


async def endless() -> AsyncIterator[bytes]:
    while True:
        BEGUN.set()
        yield b"x" * 65536
        await asyncio.sleep(0)


async def respond(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond by path: early, without the body; in large pieces, for ever; or with what arrived."""
    if scope["path"] == "/early":
        await PlainTextResponse("no", 401)(scope, receive, send)
    elif scope["path"] == "/large":
        await StreamingResponse(endless())(scope, receive, send)
    elif scope["path"] == "/slow":
        await GO_ON.wait()
        await PlainTextResponse("slow")(scope, receive, send)
    else:
        await echo(scope, receive, send)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with the method, the path and the body that arrived."""
    body = await Request(scope, receive).body()
    text = f"{scope['method']} {scope['path']} {body.decode('latin-1')}"
    await PlainTextResponse(text)(scope, receive, send)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Port of a server as vLLM starts it in the front."""
    async with serving() as port:
        yield port


@contextlib.asynccontextmanager
async def serving(app: ASGIApp = respond, **settings: Any) -> AsyncIterator[int]:
    """Serve as vLLM does in the front, with further settings of uvicorn; yield the port."""
    connections.install()
    config = uvicorn.Config(
        app, port=0, log_level="error", lifespan="off", ws="none", timeout_keep_alive=1, **settings
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    serving = asyncio.create_task(server.serve())
    await until_async(lambda: server.started)
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


CHUNKS = b"3\r\nabc\r\n0\r\n\r\n"


async def test_ambiguous_request_smuggles_no_second_request(port: int) -> None:
    for name, data in AMBIGUOUS.items():
        got = await exchange(port, data + SMUGGLED)
        assert b"smuggled" not in got, (name, got)
        assert got.startswith(b"HTTP/1.1 400"), (name, got)


async def test_body_arrives_when_another_protocol_is_wished(port: int) -> None:
    wish = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
    for framing, body in ((b"content-length: 3", b"abc"), (b"transfer-encoding: chunked", CHUNKS)):
        whole = POST + wish + framing + b"\r\n\r\n" + body
        last = whole.replace(b"POST /a", b"POST /last")
        for step in (1, 7, 1000):
            stream = whole + last
            pieces = [stream[place : place + step] for place in range(0, len(stream), step)]
            got = await exchange(port, *pieces)
            assert b"POST /a abc" in got and got.endswith(b"POST /last abc"), (framing, step, got)
    connect = b"CONNECT x:80 HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    assert (await exchange(port, connect)).startswith(b"HTTP/1.1 400")


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
        while not reader.at_eof() and sent < 100 * MAX_HEAD_BYTES:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
            await asyncio.sleep(0)
    assert sent < 100 * MAX_HEAD_BYTES


async def test_large_and_small_bodies_arrive(port: int) -> None:
    large = b"x" * (1 << 20)
    head = POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(large)
    assert (await exchange(port, head + large)).endswith(large)
    chunks = b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n"
    head = POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert (await exchange(port, head + chunks)).endswith(b"x" * 50_000)


async def test_client_that_reads_nothing_is_disconnected(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SEND_TIMEOUT_S", 0.3)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(BEGUN.wait(), DEADLINE_S)
        await until_closed(client)


async def test_slow_reader_stays_connected(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause of the server has a timer of its own, which ends with the pause."""
    timers, pause = list[Any](), connections.BoundedProtocol.pause_writing

    def pause_writing(protocol: Any) -> None:
        pause(protocol)
        timers.append(protocol._sending)

    monkeypatch.setattr(connections.BoundedProtocol, "pause_writing", pause_writing)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    with contextlib.closing(writer):
        writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        for number in range(3):
            await until_async(lambda number=number: len(timers) > number)
            while not timers[number].cancelled():
                assert await reader.readexactly(1 << 20)


async def until_closed(client: socket.socket) -> None:
    """Return when the server has closed a connection of this process."""
    ours = client.getsockname()[1]
    await until_async(
        lambda: (
            not any(
                each.raddr and each.raddr.port == ours
                for each in psutil.Process().net_connections("tcp")
            )
        )
    )


async def test_body_that_no_handler_reads_is_not_awaited_for_long(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BODY_TIMEOUT_S", 0.5)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        writer.write(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
                await asyncio.wait_for(reader.read(1000), 0.01) if reader._buffer else None


async def test_handler_sets_how_long_it_waits_for_a_body(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BODY_TIMEOUT_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        for _ in range(2):
            writer.write(POST + b"content-length: 2\r\n\r\na")
            await asyncio.sleep(0.3)
            writer.write(b"b")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len("POST /a ab")) == b"POST /a ab"


async def test_few_requests_of_a_connection_wait_for_the_one_before(port: int) -> None:
    GO_ON.clear()
    get = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        writer.write(get.replace(b"/a", b"/slow") + get * connections.MAX_PIPELINED)
        await asyncio.sleep(0.2)
        GO_ON.set()
        for _ in range(1 + connections.MAX_PIPELINED):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(int(re.search(rb"length: (\d+)", head)[1]))
    GO_ON.clear()
    many = get.replace(b"/a", b"/slow") + get * (1 + connections.MAX_PIPELINED)
    assert await exchange(port, many, ends=False) == b""
    GO_ON.set()


async def test_idle_connection_is_kept_longer_than_clients_keep_it(port: int) -> None:
    kept_s = httpx.Limits().keepalive_expiry
    assert kept_s is not None and 2 * kept_s < connections.KEEP_ALIVE_S
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        for wait_s in (0.0, 1.3):  # The server is set to close idle connections after 1 s.
            await asyncio.sleep(wait_s)
            writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(len("GET /a "))


async def test_certificate_is_renewed_as_a_kubernetes_secret_is(tmp_path: Path) -> None:
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    data = tmp_path / "..data"

    def project(number: int) -> bytes:
        """Swap a link to a folder with both files, as the kubelet does."""
        folder = tmp_path / f"..{number}"
        folder.mkdir()
        for made, name in zip(make_certificate(folder), (cert.name, key.name), strict=True):
            made.rename(folder / name)
        (tmp_path / "new").symlink_to(folder.name)
        (tmp_path / "new").replace(data)
        return ssl.PEM_cert_to_DER_cert((folder / cert.name).read_text())

    shown = project(0)
    cert.symlink_to(f"..data/{cert.name}")
    key.symlink_to(f"..data/{key.name}")
    async with serving(ssl_certfile=cert, ssl_keyfile=key) as port:
        assert await served_certificate(port) == shown
        for number in (1, 2):
            shown = project(number)
            assert await served_certificate(port) == shown


async def test_former_certificate_is_served_until_both_files_are_new(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    former = ssl.PEM_cert_to_DER_cert(cert.read_text())
    new_cert, new_key = make_certificate(tmp_path, "new")
    async with serving(ssl_certfile=cert, ssl_keyfile=key) as port:
        cert.unlink()
        assert await served_certificate(port) == former
        cert.write_text(new_cert.read_text())
        assert await served_certificate(port) == former
        key.write_text(new_key.read_text())
        assert await served_certificate(port) == ssl.PEM_cert_to_DER_cert(new_cert.read_text())


TOKENS, CHUNK_BYTES = 2000, 32 << 10
"""Size of one response: 64 MB, if each token were a chunk of its own."""
MOST_BYTES = 24 << 20
"""Buffers of the server and of both sockets: the kernel lets each grow to some megabytes."""


class Writing(Engine):
    """An engine that generates all tokens of a request, one output for each."""

    async def _end(self, request_id: str) -> None:
        for number in range(TOKENS):
            end = FinishReason.LENGTH if number == TOKENS - 1 else None
            output = EngineCoreOutput(request_id, [5], finish_reason=end)
            self._client._take_outputs(self._engine, EngineCoreOutputs(outputs=[output]))
            await asyncio.sleep(0.001)


async def test_stream_that_is_not_read_is_bounded(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_portable.front.http.REGISTRY", CollectorRegistry())
    chunks: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        params = SamplingParams(max_tokens=TOKENS, output_kind=RequestOutputKind.DELTA)

        async def stream() -> AsyncIterator[bytes]:
            async for output in front.generate({"prompt_token_ids": [1, 2]}, params, "r"):
                chunks.append(len(output.outputs[0].token_ids))
                yield json.dumps(chunks[-1]).encode().ljust(CHUNK_BYTES)

        await StreamingResponse(stream())(scope, receive, send)

    engine = Writing(front.engine_core, "pd-0")
    loop = asyncio.get_running_loop()
    async with serving(within(FrontMiddleware(app), front.engine_core)) as port:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            await loop.sock_connect(slow, ("127.0.0.1", port))
            head = POST + b"connection: close\r\ncontent-length: 2\r\n\r\n{}"
            await loop.sock_sendall(slow, head)
            await until_async(lambda: engine.sent)
            await engine.ends
            # The engine is free, whatever the client does.
            await until_async(lambda: not front.engine_core._open)
            held = [*chunks]
            assert len(held) * CHUNK_BYTES < MOST_BYTES
            read = b""
            async with asyncio.timeout(DEADLINE_S):
                while piece := await loop.sock_recv(slow, 1 << 20):
                    read += piece
    assert sum(chunks) == TOKENS
    assert read.count(b" " * (CHUNK_BYTES - 10)) == len(chunks) <= len(held) + 2
