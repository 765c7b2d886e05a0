from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from epd_portable.demo.pictures import QUESTIONS, QuestionKind, draw
from epd_portable.demo.score import evaluate, held_out_pictures, main
from epd_portable.errors import ConfigError, EngineError


class _Endpoint(BaseHTTPRequestHandler):
    """Knows the right answers to the first pictures, but counts every shape as one."""

    known: ClassVar = {draw(seed).data_url(): draw(seed).scene for seed in range(12)}

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "demo"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        image, text = body["messages"][0]["content"]
        scene = self.known.get(image["image_url"]["url"])
        if scene is None:
            self._reply(400, {"error": "unknown picture"})
            return
        kind = next(k for k, question in QUESTIONS.items() if question == text["text"])
        answer = "one" if kind is QuestionKind.COUNT else scene.answer(kind)
        self._reply(200, {"choices": [{"message": {"content": answer}}]})

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _reply(self, status: int, content: object) -> None:
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_each_kind_of_question_is_scored_apart(endpoint: str) -> None:
    score = evaluate(endpoint, n=12, seed=0)
    ones = sum(draw(seed).scene.count == 1 for seed in range(12))
    assert 0 < ones < 12
    assert score.by_kind == {QuestionKind.DESCRIBE: 1.0, QuestionKind.COUNT: ones / 12}
    assert score.exact_match == (12 + ones) / 24
    assert len(score.wrong) == 12 - ones


def test_the_exit_code_follows_the_threshold(
    endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--url", endpoint, "--n", "12"]
    assert main(asked) == 1
    assert main([*asked, "--threshold", "0.5"]) == 0
    assert "describe    100.0% exactly right" in capsys.readouterr().out


def test_a_refused_request_is_reported_with_its_status(endpoint: str) -> None:
    with pytest.raises(EngineError, match="answered 400"):
        evaluate(endpoint, n=1, seed=500)


def test_an_endpoint_that_is_not_there_gives_exit_code_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--url", "http://127.0.0.1:9", "--n", "1"]) == 2
    assert "is the server up?" in capsys.readouterr().err


@pytest.mark.parametrize(("n", "seed"), [(0, 0), (1, -1), (2, 999_999)])
def test_seeds_that_training_may_have_used_are_refused(n: int, seed: int) -> None:
    with pytest.raises(ConfigError, match=f"seed {seed}"):
        held_out_pictures(n, seed)
