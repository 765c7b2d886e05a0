"""With ``transfer.media: metadata`` the PD instance gets no picture, and answers as one process."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.asking import ask, assert_equal, body, picture, text
from tests.e2e.conftest import Pair, encoders_held, slow_steps
from tests.e2e.engines import counted, counts, forget, instance, metric, wait_until
from tests.e2e.equality import FloatSmoke
from tests.e2e.one_pair.limits import SEATS, STEP

ASK = text("What is in the picture?")


@pytest.fixture(scope="module")
def router() -> dict[str, object]:
    return {"media": "metadata"}


class TestMetadata(FloatSmoke):
    """What holds when the media go to both instances holds without them."""


def test_no_picture_reaches_the_pd_instance(pair: Pair) -> None:
    content = [picture(500, 224), ASK]
    begun = len(pair.split.events("pd_request"))
    answer = ask(pair.split.url, content)
    [sent] = pair.split.events("pd_request")[begun:]
    assert sent["nbytes"] < 1500 < len(json.dumps(body(content)))
    assert answer.sources == ["transfer"]
    assert_equal(answer, ask(pair.reference_url, content))


def test_pictures_stay_with_the_encoder_for_longer_than_a_step_has_room(pair: Pair) -> None:
    contents = [[picture(seed, 224), ASK] for seed in range(7000, 7000 + STEP // 64 + 2)]
    before = counts(pair.split.pid, "ec_producer")
    first = [ask(pair.split.url, content) for content in contents]
    forget(instance(pair.split.pid, "ec_consumer"))
    for content, answer in zip(contents, first, strict=True):
        again = ask(pair.split.url, content)
        assert again.sources == ["transfer"]
        assert again.text == answer.text
    after = counts(pair.split.pid, "ec_producer")
    risen = {
        source: after[name] - before[name]
        for source in ("encoder", "cache", "host")
        for name in [f'epd_encode_transfers_total{{source="{source}"}}']
    }
    assert risen == {"encoder": len(contents), "cache": len(contents), "host": 0}


def test_a_prompt_in_the_prefix_cache_needs_no_item(pair: Pair) -> None:
    content = [picture(501), text("What is in the picture? Please say it. " * 8)]
    first = ask(pair.split.url, content)
    assert first.sources == ["transfer"]
    forget(instance(pair.split.pid, "ec_consumer"), "encoder_cache")
    again = ask(pair.split.url, content)
    assert again.sources == ["prefix_cache"]
    assert_equal(again, first)
    assert metric(pair.split.pid, "ec_consumer", "vllm:prefix_cache_hits_total") > 0


def test_an_item_that_went_before_it_was_used_is_asked_for_again_with_its_media(
    pair: Pair,
) -> None:
    shown = picture(502)
    content = [shown, ASK]
    landed = len(pair.split.events("item.landed"))
    with ThreadPoolExecutor(SEATS + 1) as pool:
        with slow_steps(pair.split, 0.5):
            # Others keep every seat until the item is there and gone again.
            others = [
                pool.submit(ask, pair.split.url, "hello", max_tokens=200, ignore_eos=True)
                for _ in range(SEATS)
            ]
            wait_until(
                lambda: metric(pair.split.pid, "ec_consumer", "vllm:num_requests_running") == SEATS,
                "every seat is taken",
            )
            pending = pool.submit(ask, pair.split.url, content)
            wait_until(lambda: len(pair.split.events("item.landed")) > landed, "the item landed")
            forget(instance(pair.split.pid, "ec_consumer"), "encoder_cache")
            assert not any(other.done() for other in others)
        answer = pending.result()
    assert answer.sources == ["transfer"]
    sent = pair.split.events("pd_request")[-2:]
    assert sent[0]["request_id"] == sent[1]["request_id"]
    assert sent[0]["nbytes"] < len(shown["image_url"]["url"]) < sent[1]["nbytes"]
    assert_equal(answer, ask(pair.reference_url, content))


def test_a_killed_encoder_costs_no_answer(pair: Pair) -> None:
    """Runs last: the encoder is slow to come back."""
    content = [picture(503), ASK]
    with ThreadPoolExecutor() as pool, encoders_held(pair.split) as held_s:
        pending = pool.submit(ask, pair.split.url, content)
        wait_until(lambda: bool(pair.split.encoding(held_s)), "the encoder began")
        os.killpg(instance(pair.split.pid, "ec_producer").pid, signal.SIGKILL)
        answer = pending.result()
    assert answer.sources == ["local"]
    assert_equal(answer, ask(pair.reference_url, content))
    assert counted(pair.split.url, 'epd_router_fallbacks_total{fallback="original_media"}') > 0
