"""The front with two engines that do everything: each encodes for the other."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.e2e.asking import ask, ask_all, assert_equal, picture, text
from tests.e2e.conftest import Split, Start
from tests.kit.fronts import killed

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

NAMES = ("encode_prefill_decode-0", "encode_prefill_decode-1")
ASK = text("Describe the picture.")


@pytest.fixture(scope="module")
def front(start: Start) -> Split:
    counts = {"encode": 0, "prefill_decode": 0, "encode_prefill_decode": 2}
    settings = [f"instances.{role}.count={count}" for role, count in counts.items()]
    return start(["engine_args.dtype=float32", *settings])


def test_pictures_of_one_request_are_encoded_by_both(front: Split, reference_url: str) -> None:
    begin_s = time.monotonic()
    content = [*map(picture, range(600, 604)), ASK]
    answer = ask(front.url, content)
    assert_equal(answer, ask(reference_url, content))
    began = front.events("encode.begin", since_s=begin_s)
    encoded = Counter(event["instance"] for event in began for _ in event["items"])
    assert encoded == dict.fromkeys(NAMES, 2), encoded


def test_requests_at_once_share_both_as_encoders(front: Split, reference_url: str) -> None:
    contents = [[*map(picture, range(610 + 3 * n, 613 + 3 * n)), ASK] for n in range(6)]
    for answer, content in zip(ask_all(front.url, contents), contents, strict=True):
        assert_equal(answer, ask(reference_url, content))


def test_without_the_other_one_encodes_all(front: Split, reference_url: str) -> None:
    content = [*map(picture, range(640, 644)), ASK]
    with killed(front, NAMES[1]):
        answer = ask(front.url, content)
    assert_equal(answer, ask(reference_url, content))
