"""Local encoding of a prefill+decode engine, next to its steps."""

from __future__ import annotations

import time

from tests.e2e.asking import ask, generating, picture, text
from tests.e2e.conftest import Pair, encoders_drained, slow_encoder

ASK = text("What is in the pictures?")


def test_tokens_of_others_come_while_images_are_encoded(pair: Pair) -> None:
    with (
        encoders_drained(pair.split),
        slow_encoder(pair.split, seconds=0.02),
        generating(pair.split.url),
    ):
        since_s = time.monotonic()
        answer = ask(pair.split.url, [*(picture(each) for each in range(911, 915)), ASK])
    assert answer.sources == ["local"] * 4
    encoding, steps_meanwhile = 0, 0
    for event in pair.split.events(since_s=since_s):
        if event["instance"].startswith("prefill_decode"):
            encoding += event["event"] == "encode.begin"
            encoding -= event["event"] == "encode.end"
            steps_meanwhile += event["event"] == "step" and encoding
    assert steps_meanwhile
