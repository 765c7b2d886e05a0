"""A client that does not read its stream holds neither an engine nor memory without a bound."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("vllm")

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from epd_portable.front import connections
from epd_portable.front.http import FrontMiddleware
from epd_portable.front.server import Front
from tests.integration.front.played_front import within

pytestmark = pytest.mark.needs_vllm

TOKENS, CHUNK_BYTES = 2000, 32 << 10
"""Size of one response: 64 MB, if each token were a chunk of its own."""
MOST_BYTES = 24 << 20
"""Buffers of the server and of both sockets: the kernel lets each grow to some megabytes."""
DEADLINE_S = 60.0


class Writing:
    """An engine that generates all tokens of a request, one output for each."""

    def __init__(self, front: Front) -> None:
        self._client = front.engine_core
        self._engine = self._client.engines.by_name["pd-0"]
        self._engine.client = self
        self._engine.instance.health.seen_up()

    async def add_request_async(self, request: Any) -> None:
        self.task = asyncio.create_task(self._write(request.request_id))

    async def _write(self, name: str) -> None:
        for number in range(TOKENS):
            end = FinishReason.LENGTH if number == TOKENS - 1 else None
            output = EngineCoreOutput(name, [5], finish_reason=end)
            self._client._take_outputs(self._engine, EngineCoreOutputs(outputs=[output]))
            await asyncio.sleep(0.001)

    async def call_utility_async(self, method: str) -> tuple[str, ...]:
        return ("generate",)

    async def abort_requests_async(self, request_ids: list[str]) -> None: ...


@pytest.fixture
async def serving(
    front: Front,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[int, list[int]]]:
    """Port of a server, and the tokens of each chunk that it has sent or holds."""
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

    served = within(FrontMiddleware(app), front.engine_core)
    connections.install()
    config = uvicorn.Config(served, port=0, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1], chunks
    server.should_exit = True
    await task


async def test_stream_that_is_not_read_is_bounded(
    serving: tuple[int, list[int]],
    front: Front,
) -> None:
    port, chunks = serving
    engine = Writing(front)
    loop = asyncio.get_running_loop()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        await loop.sock_connect(slow, ("127.0.0.1", port))
        head = b"POST /v1/x HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
        await loop.sock_sendall(slow, head)
        async with asyncio.timeout(DEADLINE_S):
            while not hasattr(engine, "task"):
                await asyncio.sleep(0.01)
            await engine.task
            while front.engine_core._open:  # The engine is free, whatever the client does.
                await asyncio.sleep(0.01)
        held = [*chunks]
        assert len(held) * CHUNK_BYTES < MOST_BYTES
        read = b""
        async with asyncio.timeout(DEADLINE_S):
            while piece := await loop.sock_recv(slow, 1 << 20):
                read += piece
    assert sum(chunks) == TOKENS
    assert read.count(b" " * (CHUNK_BYTES - 10)) == len(chunks) <= len(held) + 2
