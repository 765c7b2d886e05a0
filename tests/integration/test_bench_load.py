"""``epd-bench load`` as a whole, against servers that answer at once: what it asks, keeps, refuses.

The servers know no model. Nothing here is about how fast anything is.
"""

from __future__ import annotations

import asyncio
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
import psutil
import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from epd_portable.bench.cli import main
from epd_portable.bench.load import measure
from epd_portable.bench.load.record import SideTurn

WORDS_PER_TOKEN = 0.5
QUICK = ["--seconds", "1", "--text", "20", "--output", "4", "--picture-format", "png"]
QUICK += ["--size", "28", "--warm-up", "1", "--max-late-ms", "5000", "--timeout", "30"]


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
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "played"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        words = len((await request.json())["prompt"].split())
        return web.json_response({"count": 1 + int(words / WORDS_PER_TOKEN)})

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
        usage = {"prompt_tokens": 20, "completion_tokens": body["max_tokens"]}
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
        server.url = site.name.rstrip("/").replace("0.0.0.0", "127.0.0.1")
        port = runner.addresses[0][1]
        server.url = f"http://127.0.0.1:{port}"
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


def load(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["load", *QUICK, *arguments])


def turns(file: Path) -> list[SideTurn]:
    return msgspec.convert(json.loads(file.read_text())["samples"], list[SideTurn])


def test_sides_are_asked_the_same_in_turns_and_their_ratios_come_first(
    played: Played, tmp_path: Path
) -> None:
    ours, one, other = played(), played(), played()
    file, picture = tmp_path / "load.json", tmp_path / "load.png"
    result = load(
        *("--side", f"ours=url:{ours.url}", "--side", f"replicas=url:{one.url},{other.url}"),
        *("--rate", "8,16", "--share", "0.5", "--pictures", "2", "--rounds", "2"),
        *("--json", str(file), "--png", str(picture)),
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.index("ours by the other sides") < result.stdout.index("Goodput")
    found = turns(file)
    assert [(turn.point[:4].strip("/s,"), turn.turn, turn.side) for turn in found] == [
        ("8", 0, "ours"),
        ("8", 0, "replicas"),
        ("16", 0, "ours"),
        ("16", 0, "replicas"),
        ("8", 1, "replicas"),
        ("8", 1, "ours"),
        ("16", 1, "replicas"),
        ("16", 1, "ours"),
    ]
    assert not [each for turn in found for each in turn.requests if each.problem]
    # The warm-up is the same for both too, whatever the order of what comes after.
    assert sorted(ours.texts) == sorted(one.texts + other.texts)
    assert len(set(ours.texts)) == len(ours.texts)
    assert {len(text.split()) for text in ours.texts} == {10}
    assert abs(len(one.texts) - len(other.texts)) <= len(found)
    measured = [each for turn in found for each in turn.requests]
    with_pictures = [each for each in measured if each.kind == "pictures"]
    assert {each.pictures for each in with_pictures} == {2}
    assert abs(len(with_pictures) - len(measured) / 2) <= len(found) / 2
    urls = [
        part["image_url"]["url"]
        for body in ours.bodies
        for part in body["messages"][0]["content"][:-1]
    ]
    assert len(set(urls)) == len(urls)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_sides_that_are_started_for_their_turns_take_all_points_of_a_round_at_once(
    played: Played, tmp_path: Path
) -> None:
    ours, replicas = played(), played()
    file = tmp_path / "load.json"
    result = load(
        *("--side", f"ours=url:{ours.url}", "--side", f"replicas=url:{replicas.url}"),
        *("--up", "turns", "--concurrency", "1", "--concurrency", "2", "--requests", "4"),
        *("--rounds", "2", "--warm-up", "0", "--json", str(file)),
    )
    assert result.exit_code == 0, result.output
    assert [(turn.turn, turn.side, turn.point[0]) for turn in turns(file)] == [
        *((0, side, clients) for side in ("ours", "replicas") for clients in "12"),
        *((1, side, clients) for side in ("replicas", "ours") for clients in "12"),
    ]
    assert sorted(ours.texts) == sorted(replicas.texts)
    assert "Each side was started for its turns" in result.output


def stop_clients_once(server: PlayedServer, seconds: float) -> None:
    """Let the clients stand still while they have requests to send."""

    def stop() -> None:
        server.on_request = lambda: None
        for child in psutil.Process().children(recursive=True):
            if any("bench.load.clients" in word for word in child.cmdline()):
                child.send_signal(signal.SIGSTOP)
                time.sleep(seconds)
                child.send_signal(signal.SIGCONT)

    server.on_request = stop


LATE = ["--rate", "30", "--rounds", "1", "--warm-up", "0", "--max-late-ms", "1500"]


def test_a_round_in_which_the_clients_were_late_is_refused_and_measured_again_later(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "AGAIN", 0)
    server = played()
    file = tmp_path / "load.json"
    arguments = ["--side", f"url:{server.url}", *LATE, "--json", str(file)]
    stop_clients_once(server, 3.0)
    result = load(*arguments)
    assert result.exit_code == 1, result.output
    assert "1 turns were refused" in result.output
    assert "leave one free" in result.output
    again = load(*arguments, "--resume")
    assert again.exit_code == 0, again.output
    first, second = turns(file)
    assert (bool(first.refused), bool(second.refused)) == (True, False)
    assert "Rounds that do not count" in again.output
    assert len(set(server.texts)) == len(server.texts)


def test_a_refused_round_is_measured_again_at_once_with_other_requests(
    played: Played, tmp_path: Path
) -> None:
    server = played()
    file = tmp_path / "load.json"
    stop_clients_once(server, 3.0)
    result = load("--side", f"url:{server.url}", *LATE, "--json", str(file))
    assert result.exit_code == 0, result.output
    assert [bool(turn.refused) for turn in turns(file)] == [True, False]
    assert len(set(server.texts)) == len(server.texts)


def test_finished_rounds_are_kept_and_only_the_others_are_asked(
    played: Played, tmp_path: Path
) -> None:
    server = played()
    file = tmp_path / "load.json"
    arguments = ["--side", f"url:{server.url}", "--concurrency", "2", "--requests", "10"]
    arguments += ["--json", str(file), "--warm-up", "0"]
    assert load(*arguments, "--rounds", "1").exit_code == 0
    first = list(server.texts)
    assert len(first) == 10
    again = load(*arguments, "--rounds", "2", "--resume")
    assert again.exit_code == 0, again.output
    assert len(server.texts) == 20
    assert not set(first) & set(server.texts[10:])
    assert [turn.turn for turn in turns(file)] == [0, 1]
    assert load(*arguments, "--rounds", "2", "--resume").exit_code == 0
    assert len(server.texts) == 20


def test_rounds_of_other_requests_are_not_mixed_with_what_is_kept(
    played: Played, tmp_path: Path
) -> None:
    server = played()
    file = tmp_path / "load.json"
    arguments = ["--side", f"url:{server.url}", "--concurrency", "1", "--requests", "2"]
    arguments += ["--rounds", "1", "--json", str(file)]
    assert load(*arguments).exit_code == 0
    before = file.read_text()
    result = load(*arguments, "--seed", "5", "--resume")
    assert result.exit_code == 2
    assert "its requests, sides or settings were others" in result.output
    assert file.read_text() == before


def test_requests_that_fail_are_counted_and_do_not_end_the_measurement(
    played: Played, tmp_path: Path
) -> None:
    server = played()
    server.refuses = lambda number: number % 2 == 0
    file = tmp_path / "load.json"
    result = load(
        *("--side", f"url:{server.url}", "--concurrency", "1", "--requests", "10"),
        *("--rounds", "1", "--warm-up", "0", "--json", str(file)),
    )
    assert result.exit_code == 0, result.output
    (turn,) = turns(file)
    problems = [each.problem for each in turn.requests]
    assert problems == list(itertools.chain(*[["", 'status 503: {"error": "no room"}']] * 5))
    assert "status 503" in result.stdout


def test_a_side_that_answers_nothing_ends_the_command_with_its_reason(played: Played) -> None:
    server = played()
    server.refuses = lambda number: True
    result = load("--side", f"url:{server.url}", "--rate", "5", "--rounds", "1", "--warm-up", "0")
    assert result.exit_code == 1
    assert "url answered nothing: status 503" in result.output


SHORT = ["--share", "0", "--seconds", "0.5"]


def test_the_highest_rate_is_looked_for_on_all_sides(played: Played, tmp_path: Path) -> None:
    fast, slow = played(), played()
    slow.wait_s = 1.6
    file = tmp_path / "load.json"
    result = load(
        *("--side", f"fast=url:{fast.url}", "--side", f"slow=url:{slow.url}"),
        *("--goodput", "8:16", "--precision", "1", "--ttft-ms", "1200", *SHORT),
        *("--json", str(file)),
    )
    assert result.exit_code == 0, result.output
    (found,) = json.loads(file.read_text())["summary"]["search"].values()
    assert found == {
        "fast": {"met": 16.0, "missed": None, "met_above": []},
        "slow": {"met": None, "missed": 8.0, "met_above": []},
    }
    asked = len(fast.bodies)
    assert len(turns(file)) == 2 * 2 * 3
    assert (
        load(
            *("--side", f"fast=url:{fast.url}", "--side", f"slow=url:{slow.url}"),
            *("--goodput", "8:16", "--precision", "1", "--ttft-ms", "1200", *SHORT),
            *("--json", str(file), "--resume", "--warm-up", "0"),
        ).exit_code
        == 0
    )
    assert len(fast.bodies) == asked


def test_recorded_traffic_is_replayed(played: Played, tmp_path: Path) -> None:
    server = played()
    trace = tmp_path / "traffic.jsonl"
    lines = [
        {"time_s": 0.1 * number, "text_tokens": 20, "output_tokens": 3, "sizes": sizes}
        for number, sizes in enumerate(([], [28], [28, 56]))
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    result = load("--side", f"url:{server.url}", "--replay", str(trace), "--rounds", "1")
    assert result.exit_code == 0, result.output
    counts = [len(body["messages"][0]["content"]) - 1 for body in server.bodies[-3:]]
    assert counts == [0, 1, 2]
    assert {body["max_tokens"] for body in server.bodies} == {3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--side", "hope", "--rate", "1"], "expected NAME=WHAT"),
        (["--side", "url:http://127.0.0.1:1"], "nothing says how often to ask"),
        (["--side", "url:http://127.0.0.1:1", "--goodput", "1:2"], "--goodput needs a limit"),
        (
            [
                *("--side", "url:http://127.0.0.1:1", "--goodput", "1:2", "--tpot-ms", "9"),
                *("--rounds", "2"),
            ],
            "give 3 or more",
        ),
        (["--side", "replicas:2", "--side", "b=replicas:3", "--rate", "1"], "divided equally"),
        (["--side", "none.yaml", "--rate", "1"], "none.yaml"),
        (["--side", "url:http://127.0.0.1:1", "--rate", "1", "--resume"], "name it by --json"),
    ],
)
def test_bad_input_ends_with_status_2_before_anything_is_started(
    arguments: list[str], words: str
) -> None:
    result = load(*arguments, *(["--units", "6"] if "divided equally" in words else []))
    if "divided equally" in words and len(os.sched_getaffinity(0)) < 6:
        words = "a side wants"
    assert result.exit_code == 2, result.output
    assert words in result.output


def test_a_server_that_is_not_there_ends_the_command_with_its_address() -> None:
    result = load("--side", "gone=url:http://127.0.0.1:1", "--rate", "1")
    assert result.exit_code == 1
    assert "--side gone: http://127.0.0.1:1" in result.output
    assert "start a server there first" in result.output


def test_a_plan_is_shown_without_starting_anything() -> None:
    result = load(
        *("--side", "ours=configs/1e1pd.yaml", "--side", "replicas:2", "--platform", "cuda"),
        *("--model", "shape", "--set", "engine_args.load_format=dummy", "--rate", "2", "--plan"),
    )
    assert result.exit_code == 0, result.output
    assert "ours: 0, 1; replicas: 0, 1" in result.output
    assert "'load_format': 'dummy'" in result.output
