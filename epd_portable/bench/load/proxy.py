"""A peer: the proxy of vLLM's example for disaggregated encoders, as far as its work a byte goes.

``python -m epd_portable.bench.load.proxy --port P --encode URL --prefill-decode URL`` stands in
for it, on the same libraries (FastAPI, aiohttp): it parses the body, sends each picture in a
request of its own to an encode instance, waits for all of them, writes the body anew for the
prefill+decode instance, and relays the answer. It has no health, no metrics, no retries and no
second instance of a kind, and unlike the example it logs nothing: what is left out costs the
example time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse

CHAT = "/v1/chat/completions"
MEDIA = ("image_url", "audio_url", "input_audio")
RELAY_BYTES = 1024


def create_app(encode: str, prefill_decode: str) -> FastAPI:
    """Return the proxy between clients and one instance of each role."""
    sessions: list[aiohttp.ClientSession] = []

    @contextlib.asynccontextmanager
    async def connected(app: FastAPI) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            sessions.append(session)
            yield

    app = FastAPI(lifespan=connected)

    async def encode_one(job: dict[str, Any]) -> None:
        async with sessions[0].post(encode + CHAT, json=job) as response:
            await response.read()
            if response.status != 200:
                raise HTTPException(502, f"the encode instance answered {response.status}")

    async def relay(body: dict[str, Any]) -> AsyncIterator[str]:
        async with sessions[0].post(prefill_decode + CHAT, json=body) as response:
            async for piece in response.content.iter_chunked(RELAY_BYTES):
                yield piece.decode()

    @app.post(CHAT, response_model=None)
    async def chat(request: Request) -> JSONResponse | StreamingResponse:
        body = await request.json()
        await asyncio.gather(*(encode_one(job) for job in encode_jobs(body)))
        if body.get("stream"):
            return StreamingResponse(relay(body), media_type="text/event-stream")
        async with sessions[0].post(prefill_decode + CHAT, json=body) as response:
            return JSONResponse(await response.json(), response.status)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def encode_jobs(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a request for each medium of a body, with nothing else in it."""
    parts = [
        part
        for message in body["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] in MEDIA
    ]
    # As in the example: fields that go with others, as stream_options with stream, are left out.
    alone = {"model": body["model"], "max_tokens": 1, "stream": False}
    return [{**alone, "messages": [{"role": "user", "content": [part]}]} for part in parts]


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--encode", required=True)
    parser.add_argument("--prefill-decode", required=True)
    options = parser.parse_args()
    uvicorn.run(
        create_app(options.encode, options.prefill_decode),
        host="127.0.0.1",
        port=options.port,
        log_config=None,
        access_log=False,
    )


if __name__ == "__main__":
    main()
