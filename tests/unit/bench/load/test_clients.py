from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from epd_portable.bench.load.clients import LoadClients, read_stream
from epd_portable.bench.load.plan import LoadRequest
from epd_portable.bench.servers import free_port
from tests.servers import serving


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}}])


ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
USAGE = event(choices=[], usage={"prompt_tokens": 11, "completion_tokens": 2})
DONE = b"data: [DONE]\n\n"
AMPLE_S = 60.0


def test_an_answer_is_timed_by_its_pieces_of_text() -> None:
    pieces = [(1.0, ROLE), (1.5, token("a")), (2.0, token("b") + USAGE), (3.0, DONE)]
    times, usage, problem = read_stream(pieces, output_tokens=2)
    assert times == [1.5, 2.0]
    assert usage == {"prompt_tokens": 11, "completion_tokens": 2}
    assert problem == ""


def test_an_event_counts_when_its_last_byte_has_come() -> None:
    cut = token("a")
    pieces = [(1.0, cut[:20]), (2.0, cut[20:-1]), (3.0, cut[-1:] + USAGE + DONE)]
    assert read_stream(pieces, output_tokens=2)[0] == [3.0]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (token("a") + USAGE, "ended without"),
        (token("a") + event(error={"message": "no room"}) + DONE, "broke off: .*no room"),
        (token("a") + DONE, "0 tokens in place of 2"),
        (ROLE + USAGE + DONE, "no text"),
        (b"data: {]\n\n", "not what it should be"),
        (b"data: []\n\n", "not what it should be"),
        (event(choices=[{}]), "not what it should be"),
    ],
)
def test_an_answer_that_is_not_as_asked_for_has_a_problem(data: bytes, words: str) -> None:
    assert re.search(words, read_stream([(1.0, data)], output_tokens=2)[2])


def test_a_server_that_is_not_there_is_named_in_the_answer() -> None:
    request = LoadRequest(at_s=0.0, text="a", text_tokens=1, output_tokens=2)
    url = f"http://127.0.0.1:{free_port()}"
    (answer,) = LoadClients([request], [url], "m", words_per_token=1.0, clients=0).send().answers
    assert url.removeprefix("http://") in answer.problem and "Refused" in answer.problem


def test_clients_of_a_closed_loop_have_one_request_each_at_a_time() -> None:
    pair = threading.Barrier(2)
    open_requests: list[object] = []
    most: list[int] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            open_requests.append(self)
            pair.wait(AMPLE_S)
            most.append(len(open_requests))
            pair.wait(AMPLE_S)
            open_requests.remove(self)
            self.send_error(503)

        def log_message(self, *_: object) -> None:
            pass

    requests = [
        LoadRequest(at_s=9.0, text=str(n), text_tokens=1, output_tokens=2) for n in range(6)
    ]
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Server)) as url:
        answers = LoadClients(requests, [url], "m", words_per_token=1.0, clients=2).send().answers
    assert [answer.problem.partition(":")[0] for answer in answers] == ["status 503"] * 6
    assert most == [2] * 6
