"""Answers to sampled requests with a seed, whose text is computed before their picture is there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from tests.e2e.asking import body, picture, post, text
from tests.e2e.cases import ASK
from tests.e2e.conftest import Pair, encoders_held
from tests.e2e.engines import instance, wait_until

CONTENT = [text("Look at this picture, please, and say what it shows: "), picture(900), ASK]


def drawn(url: str, *, seed: int) -> list[list[str]]:
    """Ask for two answers drawn at random; return the tokens of each.

    The demo model is sure of its words, and takes the likeliest alone unless it is told otherwise.
    """
    response = post(url, body(CONTENT, temperature=2, top_k=0, seed=seed, n=2))
    assert response.status_code == 200, response.text
    choices = sorted(response.json()["choices"], key=lambda choice: int(choice["index"]))
    return [[step["token"] for step in choice["logprobs"]["content"]] for choice in choices]


def test_seeded_response_equals_one_process_if_chunked(pair: Pair) -> None:
    """After each part vLLM sets the generator back, which one of the CPU does not allow."""

    def steps() -> list[dict[str, Any]]:
        events = pair.split.events("step", since_s=held_s)
        return [event for event in events if event["instance"].startswith("prefill_decode")]

    server = instance(pair.split.pid, "ec_consumer")
    engine = {server, *server.children(recursive=True)}
    with ThreadPoolExecutor() as pool:
        with encoders_held(pair.split) as held_s:
            pending = pool.submit(drawn, pair.split.url, seed=1)
            wait_until(lambda: bool(steps()), "the text is computed")
        split = pending.result()
    assert engine == set(filter(psutil.Process.is_running, engine)), "the engine has ended"
    assert split == drawn(pair.reference_url, seed=1)
    assert split[0] != split[1]
    assert split != drawn(pair.reference_url, seed=5), "the seed says nothing"
