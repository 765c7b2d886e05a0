"""The front with two engines that answer, one of them on an encoder's core.

Nothing is lost while one is away.
"""

from __future__ import annotations

import os

import httpx
import pytest

from tests.e2e.asking import body, picture, post, text
from tests.e2e.conftest import Split, Start
from tests.e2e.engines import RESTART_S, process, wait_until
from tests.kit.fronts import is_up, killed
from tests.kit.load import Load

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

ASK = text("Describe the picture.")


@pytest.fixture(scope="module")
def front(start: Start) -> Split:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    settings = ["engine_args.dtype=float32", "instances.prefill_decode.count=2"]
    settings += [f"instances.encode.cores=[{first}]"]
    settings += [f"instances.prefill_decode.cores=[{first},{second}]"]
    return start([*settings, "front.elastic_encode=true"])


def load(front: Split, reference_url: str) -> Load[httpx.Response]:
    """Let three clients send requests, and compare with plain vLLM."""
    contents = [[picture(seed), ASK] for seed in range(6)] + ["Hello", "Who are you?"]
    expected = [words(post(reference_url, body(each))) for each in contents]

    def send(number: int) -> httpx.Response:
        index = number % len(contents)
        reply = post(front.url, body(contents[index]))
        if reply.status_code == 200:
            assert words(reply) == expected[index]
        return reply

    return Load(send, clients=3, pause_s=0.0)


def words(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def test_requests_of_a_killed_engine_go_to_the_other(front: Split, reference_url: str) -> None:
    with load(front, reference_url) as sending, killed(front, "prefill_decode-1"):
        sending.wait_for(20)
    # Only requests with a first token are lost.
    lost = [reply for reply in sending.seen if reply.status_code != 200]
    assert len(lost) <= 3
    assert all(reply.status_code == 503 and reply.headers["retry-after"] for reply in lost)


def test_a_stopped_engine_is_seen_and_ended(front: Split) -> None:
    victim = process(front.pid, "prefill_decode-0")
    victim.suspend()
    assert not is_up(front, "prefill_decode-0")
    victim.kill()
    wait_until(lambda: is_up(front, "prefill_decode-0"), "it is back", within_s=RESTART_S)
    assert words(post(front.url, body([picture(50), ASK])))
