"""A PD instance without encoder answers as one process, and survives the loss of the encoders."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.e2e.asking import ask, assert_equal, body, picture, post, text
from tests.e2e.cases import SINGLE
from tests.e2e.conftest import IN_ENGINE, Pair, Start
from tests.e2e.engines import instance
from tests.e2e.equality import TOLERANCE

pytestmark = [pytest.mark.e2e, pytest.mark.needs_vllm, pytest.mark.timeout(900)]

ASK = text("What is in the picture?")


@pytest.fixture(scope="module")
def pair(start: Start) -> Pair:
    return start(
        [
            "engine_args.dtype=float32",
            IN_ENGINE,
            "transfer.media=metadata",
            "instances.prefill_decode.encoder=false",
        ],
    )


@pytest.mark.parametrize("content", SINGLE.values(), ids=SINGLE)
def test_an_answer_is_that_of_one_process(pair: Pair, content: Any) -> None:
    split, reference = ask(pair.split.url, content), ask(pair.reference_url, content)
    assert_equal(split, reference, tolerance=TOLERANCE)
    assert set(split.sources) <= {"transfer"}


def test_it_holds_no_encoder(pair: Pair) -> None:
    loaded = {
        event["instance"]: event["parameters"]
        for event in pair.split.events("model.loaded", since_s=0)
    }
    assert loaded["encode-0"]["visual"] > 0
    assert loaded["prefill_decode-0"].get("visual", 0) == 0
    assert loaded["prefill_decode-0"]["language_model"] > 0


def test_without_encoders_pictures_are_refused_and_text_is_answered(pair: Pair) -> None:
    """Runs last: the encoder is slow to come back."""
    os.killpg(instance(pair.split.pid, "ec_producer").pid, signal.SIGKILL)
    refused = post(pair.split.url, body([picture(600), ASK]))
    assert refused.status_code == 503, refused.text
    assert int(refused.headers["retry-after"]) > 0
    assert ask(pair.split.url, "hello").tokens
