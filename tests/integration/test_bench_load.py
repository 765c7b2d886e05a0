"""``epd-bench load`` against servers that respond at once, by ``vllm bench serve`` itself."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from epd_benchmarks.cli import main

WORDS_PER_TOKEN = 0.5
QUICK = "text=20,output=4,size=28"


class PlayedServer:
    """An OpenAI server that answers as many tokens as are asked for.

    Attributes:
        url: Its base address.
        bodies: Of the requests that came.
        wait_s: Time before the first token.
        refuses: Called with the number of a request; true is answered 503.
        on_request: Called at each request.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[dict[str, Any]] = []
        self.wait_s = 0.0
        self.refuses: Callable[[int], bool] = lambda number: False
        self.on_request: Callable[[], None] = lambda: None

    @property
    def texts(self) -> list[str]:
        """Texts of the requests."""
        return [body["messages"][0]["content"][-1]["text"] for body in self.bodies]

    def app(self) -> web.Application:
        """Return the server."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "played", "root": "played"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.on_request()
        if self.refuses(len(self.bodies)):
            return web.json_response({"error": "no room"}, status=503)
        await asyncio.sleep(self.wait_s)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for _ in range(body["max_completion_tokens"]):
            await answer.write(event(choices=[{"index": 0, "delta": {"content": "word"}}]))
        words = sum(
            len(part["text"].split())
            for message in body["messages"]
            for part in message["content"]
            if not isinstance(part, str) and part["type"] == "text"
        )
        tokens = 9 + int(words / WORDS_PER_TOKEN)
        usage = {"prompt_tokens": tokens, "completion_tokens": body["max_completion_tokens"]}
        await answer.write(event(choices=[], usage=usage) + b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


@pytest.fixture
def played() -> Iterator[Callable[[], PlayedServer]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runners: list[web.AppRunner] = []

    async def serve() -> PlayedServer:
        server = PlayedServer("")
        runner = web.AppRunner(server.app())
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return server

    def wait(future: Future[Any]) -> Any:
        return future.result(30)

    yield lambda: wait(asyncio.run_coroutine_threadsafe(serve(), loop))
    for runner in runners:
        wait(asyncio.run_coroutine_threadsafe(runner.cleanup(), loop))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


Played = Callable[[], PlayedServer]


pytestmark = pytest.mark.needs_vllm


def load(*arguments: str, json_file: Path) -> tuple[Result, dict[str, Any]]:
    words = ["load", "--rounds", "1", "--seconds", "2", "--json", str(json_file), *arguments]
    result = CliRunner().invoke(main, words)
    assert json_file.is_file(), result.output
    return result, json.loads(json_file.read_text("utf-8"))


# Four processes of vLLM: a minute. tests/unit/benchmarks has the figures.
@pytest.mark.full
def test_sides_get_equal_requests_in_turns(tmp_path: Path, played: Played) -> None:
    first, *both = (played() for _ in range(3))
    result, written = load(
        *("--side", f"ours=url:{first.url}"),
        *("--side", f"peers=url:{both[0].url},{both[1].url}"),
        *("--point", f"rate=5,share=0.5,{QUICK}"),
        *("--goodput", "ttft:60000"),
        json_file=tmp_path / "l.json",
    )
    assert result.exit_code == 0, result.output
    measured = [body for body in first.bodies if body["max_completion_tokens"] == 4]
    others = [[body for body in peer.bodies if body["max_completion_tokens"] == 4] for peer in both]
    assert (len(measured), [*map(len, others)]) == (10, [5, 5])

    def contents(bodies: Iterable[dict[str, Any]]) -> list[str]:
        return sorted(json.dumps(body["messages"][0]["content"]) for body in bodies)

    assert contents(measured) == contents([*others[0], *others[1]])
    images = [b for b in measured if b["messages"][0]["content"][0]["type"] == "image_url"]
    assert len(images) == 5
    assert all(body["ignore_eos"] and body["stream"] for body in measured)
    ours, peers = written["samples"]
    assert ours["requests"] == peers["requests"] == {"text": 5, "images": 5, "all": 10}
    assert ours["vllm"]["completed"] == peers["vllm"]["completed"] == 10
    assert ours["vllm"]["request_goodput"] > 0
    assert "ours by the other sides" in result.output
    assert re.search(r"rate=5,.*: peers: images", result.output)
