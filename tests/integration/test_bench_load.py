"""``epd-bench load`` as a whole, against servers that answer at once: what it asks, keeps, refuses.

The servers know no model. Nothing here is about how fast anything is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from epd_portable.bench.cli import main
from epd_portable.bench.load import measure
from epd_portable.bench.load import turns as figures
from epd_portable.bench.load.turns import Turn

WORDS_PER_TOKEN = 0.5
QUICK = "text=20,output=4,size=28"
"""Of each first point."""


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
        return web.json_response({"data": [{"id": "played"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.on_request()
        if self.refuses(len(self.bodies)):
            return web.json_response({"error": "no room"}, status=503)
        await asyncio.sleep(self.wait_s)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for _ in range(body["max_tokens"]):
            await answer.write(event(choices=[{"index": 0, "delta": {"content": "word"}}]))
        words = sum(
            len(part["text"].split())
            for message in body["messages"]
            for part in message["content"]
            if not isinstance(part, str) and part["type"] == "text"
        )
        tokens = 9 + int(words / WORDS_PER_TOKEN)
        usage = {"prompt_tokens": tokens, "completion_tokens": body["max_tokens"]}
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


@pytest.fixture(autouse=True)
def on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MAX_LATE_S", 5.0)


def load(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["load", "--seconds", "1", *arguments])


def read_turns(file: Path) -> list[Turn]:
    return msgspec.convert(json.loads(file.read_text())["samples"], list[Turn])


def test_sides_are_asked_the_same_in_turns_and_their_ratios_come_first(
    played: Played, tmp_path: Path
) -> None:
    ours, one, other = played(), played(), played()
    file = tmp_path / "load.json"
    result = load(
        *("--side", f"ours=url:{ours.url}", "--side", f"replicas=url:{one.url},{other.url}"),
        *("--point", f"{QUICK},rate=8/16,share=0.5,pictures=2", "--rounds", "2"),
        *("--json", str(file)),
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.index("ours by the other sides") < result.stdout.index("goodput")
    found = read_turns(file)
    assert [(turn.point.partition("rate=")[2], turn.round, turn.side) for turn in found] == [
        ("8", 0, "ours"),
        ("16", 0, "ours"),
        ("8", 0, "replicas"),
        ("16", 0, "replicas"),
        ("8", 1, "replicas"),
        ("16", 1, "replicas"),
        ("8", 1, "ours"),
        ("16", 1, "ours"),
    ]
    assert not any(turn.failed for turn in found)
    for first, second in itertools.combinations(found, 2):
        if (first.point, first.round) == (second.point, second.round):
            assert first.requests == second.requests
    # At each point of each round one address has two warm-up requests of a kind, two have four;
    # the first side has the probes.
    counted = sum(turn.count for turn in found if turn.side == "ours")
    assert len(ours.texts) == counted + 2 + 4 * 4
    assert len(one.texts) + len(other.texts) == counted + 4 * 8
    assert len(set(ours.texts)) == len(ours.texts)
    assert set(ours.texts[2:]) <= set(one.texts + other.texts)
    assert {len(text.split()) for text in ours.texts[2:]} == {10}
    assert abs(len(one.texts) - len(other.texts)) <= len(found)
    with_pictures = sum(turn.requests.get("pictures", 0) for turn in found)
    assert {turn.pictures for turn in found} == {2 * turn.requests["pictures"] for turn in found}
    assert abs(with_pictures - sum(turn.count for turn in found) / 2) <= len(found) / 2
    urls = [
        part["image_url"]["url"]
        for body in ours.bodies
        for part in body["messages"][0]["content"][:-1]
    ]
    assert urls and len(set(urls)) == len(urls)


@contextlib.contextmanager
def stopping_clients_once(server: PlayedServer, seconds: float) -> Iterator[None]:
    """Let the clients stand still while they have requests of the first point to send."""

    def stop() -> None:
        server.on_request = lambda: None
        os.kill(os.getpid(), signal.SIGUSR1)  # The main thread, which sends, has the handler.

    # The probes and the warm-up of two points are not measured.
    before = iter(range(6))
    server.on_request = lambda: None if next(before, None) is not None else stop()
    usual = signal.signal(signal.SIGUSR1, lambda *_: time.sleep(seconds))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, usual)


def test_a_round_in_which_the_clients_were_late_is_measured_again_with_other_requests(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "MAX_LATE_S", 1.5)
    server = played()
    file = tmp_path / "load.json"
    with stopping_clients_once(server, 3.0):
        result = load(
            *("--side", f"url:{server.url}", "--point", f"{QUICK},rate=30/20,share=0"),
            *("--rounds", "1", "--json", str(file)),
        )
    assert result.exit_code == 0, result.output
    assert [(turn.point[-2:], turn.round, bool(turn.refused)) for turn in read_turns(file)] == [
        ("30", 0, True),
        ("20", 0, False),
        ("30", 1, False),
    ]
    assert "1 turns were refused; their rounds do not count: " in result.output
    assert "leave one free" in result.output
    assert len(set(server.texts)) == len(server.texts)


@pytest.mark.parametrize(
    ("point", "tries"), [("rate=9", [0, 1]), ("file=asked.jsonl,prompts=3", [0])]
)
def test_further_rounds_end_with_their_number_or_with_the_lines_of_a_file(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, tries: list[int]
) -> None:
    monkeypatch.setattr(figures, "MAX_LATE_S", -1.0)
    monkeypatch.setattr(measure, "ATTEMPTS", 2)
    (tmp_path / "asked.jsonl").write_text('{"prompt": "why", "images": []}\n' * 5)
    monkeypatch.chdir(tmp_path)
    result = load(
        *("--side", f"url:{played().url}", "--point", f"{QUICK},{point}"),
        *("--rounds", "1", "--json", "load.json"),
    )
    assert result.exit_code == 1
    assert [turn.round for turn in read_turns(Path("load.json"))] == tries
    assert f"too few rounds count, because {len(tries)} turns were refused" in result.output


@pytest.mark.parametrize("every", [1, 2])
def test_requests_that_fail_are_counted_and_end_the_command_only_where_all_do(
    played: Played, tmp_path: Path, every: int
) -> None:
    server = played()
    server.refuses = lambda number: number > 4 and number % every == 0
    file = tmp_path / "load.json"
    result = load(
        *("--side", f"url:{server.url}", "--point", f"{QUICK},rate=20,share=0"),
        *("--rounds", "1", "--json", str(file)),
    )
    (turn,) = read_turns(file)
    assert turn.failed == turn.count // every > 0
    assert turn.problem == 'status 503: {"error": "no room"}'
    assert result.exit_code == (every == 1), result.output
    assert ("answered 0 of" in result.output) == (every == 1)


def test_a_preset_is_measured_as_far_as_other_options_do_not_take_its_place(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = played()
    server.wait_s = 0.5  # The clients are idle meanwhile: busy ones are refused.
    file, asked = tmp_path / "load.json", tmp_path / "asked.jsonl"
    (tmp_path / "cat.png").write_bytes(b"a cat")
    rows = [json.dumps({"prompt": f"question {n}", "images": ["cat.png"]}) for n in range(9)]
    asked.write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    options = [
        *("--preset", "vision-arena", "--side", f"url:{server.url}", "--json", str(file)),
        *("--point", "file=asked.jsonl,prompts=3,output=4"),
    ]
    result = load(*options)
    assert result.exit_code == 0, result.output
    assert [turn.count for turn in read_turns(file)] == [3, 3, 3], "rounds are the preset's"
    assert set(server.texts) >= {f"question {n}" for n in range(9)}
    shown = [body["messages"][0]["content"][0].get("image_url") for body in server.bodies]
    assert {"url": "data:image/png;base64,YSBjYXQ="} in shown
    begun = len(server.bodies)
    server.refuses = lambda number: number == begun + 7
    result = load(*options)
    assert "url answered 8 of 9 requests: status 503" in result.output
    assert result.exit_code == 1


URL = ["--side", "url:http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (URL, "Missing option '--point'"),
        (["--side", "replicas:2", "--point", "rate=1"], "plain vLLM gets the model"),
        (["--side", "upstream:1E1PD", "--point", "rate=1"], "by --upstream-proxy"),
        (
            [
                *("--side", "configs/1e1pd.yaml", "--side", "replicas:3", "--platform", "cuda"),
                *("--point", "rate=1"),
            ],
            "divided equally",
        ),
    ],
)
def test_bad_input_ends_with_status_2_before_anything_is_started(
    arguments: list[str], words: str
) -> None:
    result = load(*arguments)
    assert result.exit_code == 2, result.output
    assert words in result.output


def test_a_server_that_is_not_there_ends_the_command_with_its_address() -> None:
    result = load("--side", "gone=url:http://127.0.0.1:1", "--point", "rate=9")
    assert result.exit_code == 1
    assert "--side gone: http://127.0.0.1:1" in result.output
    assert "start a server there first" in result.output
