"""``transfer.preallocation: async``: items come before their requests, and answers stay equal."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.e2e.asking import ask, ask_all, assert_close, body, picture, post, text
from tests.e2e.cases import ASK
from tests.e2e.conftest import slow_steps
from tests.e2e.engines import instance, wait_until
from tests.e2e.two_encoders.deployment import Deployment

PICTURES = 8


def test_an_item_announced_before_its_request_is_accepted_and_answers_stay_equal(
    deployment: Deployment,
) -> None:
    """The API server of the PD instance stands still; its scheduler goes on."""
    server = instance(deployment.split.pid, "ec_consumer")
    long = body("hello", max_tokens=100, ignore_eos=True, logprobs=False, top_logprobs=None)
    content = [*(picture(seed, 224) for seed in range(300, 300 + PICTURES)), ASK]
    with ThreadPoolExecutor() as pool:
        with slow_steps(deployment.split, 0.5):
            # An instance without requests does not step, and so accepts nothing.
            asked_s = time.monotonic()
            busy = pool.submit(post, deployment.split.url, long)
            wait_until(
                lambda: bool(deployment.split.events("step", since_s=asked_s)), "it computes"
            )
            begun = len(deployment.split.events())
            server.suspend()
            try:
                pending = pool.submit(ask, deployment.split.url, content)
                wait_until(
                    lambda: (
                        "item.accepted" in {e["event"] for e in deployment.split.events()[begun:]}
                    ),
                    "an item is accepted",
                )
            finally:
                server.resume()
        split = pending.result()
        busy.result()
    assert set(split.sources) == {"transfer"}
    deployment.compare(content, split)
    order = [e["event"] for e in sorted(deployment.split.events()[begun:], key=lambda e: e["t_s"])]
    assert order.index("item.accepted") < order.index("request.arrived")


def test_requests_at_once_are_answered_as_by_one_process(deployment: Deployment) -> None:
    contents: list[Any] = [[picture(seed), ASK] for seed in range(400, 406)]
    contents += [[picture(seed), text("and"), picture(seed + 1), ASK] for seed in range(403, 408)]
    contents += ["How are you?", [text("Twice:"), picture(409), picture(409), ASK]]
    for content, answer in zip(contents, ask_all(deployment.split.url, contents), strict=True):
        assert_close(answer, ask(deployment.pair.reference_url, content))
        assert set(answer.sources) <= {"transfer", "encoder_cache"}
    assert deployment.split.encoded_by("prefill_decode") == []
