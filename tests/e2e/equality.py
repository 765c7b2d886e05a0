"""Equality of a topology with plain vLLM, on every platform and transfer path."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from epd_portable.launch.plan import machine as installed
from tests.e2e.asking import ask, ask_all, ask_streamed, assert_brought, assert_equal, picture, text
from tests.e2e.cases import ASK, REPEATED, SINGLE, mixed_32
from tests.e2e.conftest import Pair
from tests.e2e.engines import metric

_LATE = re.compile("not written within|not delivered within")
MOST_LATE = 4
COUNTS_NOTHING = (0, 28)
"""First vLLM that counts no token for what is only encoded; before, it is one a request."""

SMOKE = ("one picture", "one picture twice", "text, picture, text, picture")
"""Part of `SINGLE`, where another module compares all of them."""


def assert_answer_is_that_of_one_process(pair: Pair, content: Any) -> None:
    split, reference = ask(pair.split.url, content), ask(pair.reference_url, content)
    assert_equal(split, reference)
    assert_brought(split, content, "transfer")


class FloatSmoke:
    """`FloatEquality` for three requests: by another path, or with other settings.

    Modules supply the fixture ``pair``. With ``--full`` all requests with one answer are compared.
    """

    @pytest.mark.parametrize(
        "content",
        [
            pytest.param(content, id=name, marks=[pytest.mark.full] * (name not in SMOKE))
            for name, content in SINGLE.items()
        ],
    )
    def test_an_answer_is_that_of_one_process(self, pair: Pair, content: Any) -> None:
        assert_answer_is_that_of_one_process(pair, content)

    def test_the_pd_instance_encoded_nothing(self, pair: Pair) -> None:
        """Looks back at what has been asked, whatever of the above has run by now."""
        ask_all(pair.split.url, [[picture(seed), ASK] for seed in range(50, 53)])
        assert len(pair.split.encoded_by("encode")) >= 3
        assert pair.split.encoded_by("prefill_decode") == []


class FloatEquality:
    """In float32 the tokens are those of one process, and log-probabilities are within 1e-3.

    Modules supply the fixture ``pair``; it is started once for all these tests.
    """

    @pytest.mark.parametrize("content", SINGLE.values(), ids=SINGLE)
    def test_an_answer_is_that_of_one_process(self, pair: Pair, content: Any) -> None:
        assert_answer_is_that_of_one_process(pair, content)

    def test_answers_depend_on_the_picture(self, pair: Pair) -> None:
        answers = {ask(pair.split.url, [picture(seed), ASK]).text for seed in range(10, 16)}
        assert len(answers) >= 4

    def test_image_of_earlier_request_is_not_transferred_again(self, pair: Pair) -> None:
        first = ask(pair.split.url, REPEATED)
        again = ask(pair.split.url, [text("Look: "), *REPEATED])
        assert first.sources == ["transfer"]
        assert again.sources == ["encoder_cache"]
        reference = ask(pair.reference_url, [text("Look: "), *REPEATED])
        assert_equal(again, reference)

    def test_a_streamed_answer_is_that_of_one_process(self, pair: Pair) -> None:
        content = [picture(31), ASK]
        split = ask_streamed(pair.split.url, content)
        assert_equal(split, ask_streamed(pair.reference_url, content))

    def test_32_mixed_requests_at_once_are_served_as_by_one_process(self, pair: Pair) -> None:
        contents = mixed_32()
        split = ask_all(pair.split.url, contents)
        for content, answer in zip(contents, split, strict=True):
            assert_equal(answer, ask(pair.reference_url, content))

    def test_completions_are_those_of_one_process(self, pair: Pair) -> None:
        request = {"model": "demo", "prompt": "a red", "max_tokens": 8, "temperature": 0}
        texts = [
            httpx.post(f"{url}/v1/completions", json=request, timeout=60, trust_env=False).json()[
                "choices"
            ][0]["text"]
            for url in (pair.split.url, pair.reference_url)
        ]
        assert texts[0] == texts[1] != ""

    def test_encoder_holds_vision_tower_and_no_kv_cache(self, pair: Pair) -> None:
        loaded = {
            event["instance"]: event["parameters"]
            for event in pair.split.events("model.loaded", since_s=0)
        }
        layers = {
            event["instance"]: event["layers"]
            for event in pair.split.events("kv_cache.ready", since_s=0)
        }
        assert loaded["encode-0"]["visual"] == loaded["prefill_decode-0"]["visual"] > 0
        assert loaded["encode-0"]["language_model"] == 0
        assert loaded["prefill_decode-0"]["language_model"] > 0
        assert layers["encode-0"] == 0
        assert layers["prefill_decode-0"] > 0

    def test_pd_encoded_nothing_and_encoder_generated_nothing(self, pair: Pair) -> None:
        """Runs last: it looks back at everything above."""
        assert len(pair.split.encoded_by("encode")) >= 30
        counted = httpx.get(f"{pair.split.url}/metrics", timeout=60, trust_env=False).text
        why = [
            line
            for line in counted.splitlines()
            if line.startswith(("epd_front_items", "epd_front_elastic"))
        ]
        failed = pair.split.events("item.failed")
        # On a machine that is too busy an item may miss its lease; and the pool of four, which 32
        # requests share, may take the room of an item that landed back for an older request.
        late = {event["mm_hash"] for event in failed if _LATE.search(event["reason"])}
        landed = {event["mm_hash"] for event in pair.split.events("item.landed")}
        local = set(pair.split.encoded_by("prefill_decode"))
        assert local <= late | landed, (local, failed, pair.split.events("item.local"), why)
        assert len(local) <= MOST_LATE, (local, failed)
        made_up = metric(pair.split.pid, "ec_producer", "vllm:generation_tokens_total")
        (version,) = installed.installed_engines().values()
        if tuple(map(int, version.split(".")[:2])) < COUNTS_NOTHING:
            jobs = metric(pair.split.pid, "ec_producer", "vllm:request_success_total")
            assert made_up <= jobs
        else:
            assert made_up == 0
        assert metric(pair.split.pid, "ec_consumer", "vllm:generation_tokens_total") > 100
