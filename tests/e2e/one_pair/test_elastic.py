"""What a PD instance encodes by choice, beside its steps, and what comes are one prompt."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.asking import ask, ask_streamed, assert_equal, picture, text
from tests.e2e.conftest import Pair, slow_encoder
from tests.e2e.engines import counted

ASK = text("What is in the pictures?")


@pytest.fixture(scope="module")
def router() -> dict[str, object]:
    return {"elastic_encode": True, "elastic_threshold": 1.0}


def test_tokens_of_others_come_while_a_picture_is_encoded(pair: Pair) -> None:
    ask(pair.split.url, [picture(910), ASK])
    since_s = time.monotonic()
    with ThreadPoolExecutor() as pool, slow_encoder(pair.split, seconds=0.02):
        streamed = pool.submit(
            ask_streamed, pair.split.url, "Tell me.", max_tokens=400, ignore_eos=True
        )
        while not pair.split.events("step", since_s=since_s):
            time.sleep(0.01)
        answer = ask(pair.split.url, [*(picture(each) for each in range(911, 915)), ASK])
        beside = streamed.result()
    assert answer.sources.count("local") >= 2
    assert len(beside.tokens) == 400
    encoding, steps_beside = 0, 0
    for event in pair.split.events(since_s=since_s):
        if event["instance"].startswith("prefill_decode"):
            encoding += event["event"] == "encode.begin"
            encoding -= event["event"] == "encode.end"
            steps_beside += event["event"] == "step" and encoding
    assert steps_beside


def test_the_first_pictures_are_encoded_here_and_the_last_ones_come(pair: Pair) -> None:
    # Of this size none has been seen: it goes to the encoder.
    assert ask(pair.split.url, [picture(900), ASK]).sources == ["transfer"]
    content = [*(picture(each) for each in range(901, 905)), ASK]
    answer = ask(pair.split.url, content)
    here = answer.sources.count("local")
    assert answer.sources == ["local"] * here + ["transfer"] * (4 - here)
    assert 1 <= here <= 3
    assert_equal(answer, ask(pair.reference_url, content))
    assert counted(pair.split.url, 'epd_router_elastic_items_total{reason="idle"}') == here
