"""A stand-in for the proxy of vLLM's example for disaggregated encoders, with the same options.

On the same libraries (FastAPI, aiohttp) it does the example's work for streamed requests: it parses
the body, sends each picture in a request of its own to the encode instance, waits for all of them,
writes the body anew for the prefill+decode instance, and relays the answer. It has no metrics or
retries, one instance of a kind, and logs nothing: what is left out costs the example time.
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
from fastapi.responses import StreamingResponse

CHAT = "/v1/chat/completions"
_RELAY_BYTES = 1024


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
            async for piece in response.content.iter_chunked(_RELAY_BYTES):
                yield piece.decode()

    @app.post(CHAT)
    async def chat(request: Request) -> StreamingResponse:
        body = await request.json()
        await asyncio.gather(*map(encode_one, encode_jobs(body)))
        return StreamingResponse(relay(body), media_type="text/event-stream")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def encode_jobs(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a request for each picture of a body, with nothing else in it."""
    parts = [
        part
        for message in body["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]
    # As in the example: fields that go with others, as stream_options with stream, are left out.
    alone = {"model": body["model"], "max_tokens": 1, "stream": False}
    return [{**alone, "messages": [{"role": "user", "content": [part]}]} for part in parts]


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    for name in ("encode", "prefill", "decode"):
        parser.add_argument(f"--{name}-servers-urls", required=True)
    options = parser.parse_args()
    app = create_app(options.encode_servers_urls, options.decode_servers_urls)
    uvicorn.run(app, host=options.host, port=options.port, log_config=None, access_log=False)


if __name__ == "__main__":
    main()
