"""The front over engines of two ranks, and on vLLM's second model runner."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.asking import ask, assert_equal, picture, text
from tests.e2e.conftest import CPU_MODULES, VIDEOS, Pair, Split, forking, running
from tests.e2e.equality import assert_answer_is_that_of_one_process
from tests.e2e.modalities.parts import frames
from tests.e2e.ranks import TWO_RANKS
from tests.e2e.second_runner import ENV, SETTINGS
from tests.forked import Popen

pytestmark = pytest.mark.full

FLOAT = ["engine_args.dtype=float32"]
TWO_ENCODERS = [
    "instances.encode.count=2",
    f"engine_args.limit_mm_per_prompt={json.dumps(VIDEOS['limit_mm_per_prompt'])}",
]
ASK = text("Describe the picture.")


def check(front: Split, reference_url: str) -> None:
    pair = Pair(split=front, reference_url=reference_url)
    for content in ([picture(1), ASK], [picture(2), picture(3), ASK], "Hello"):
        assert_answer_is_that_of_one_process(pair, content)


def test_two_ranks_answer_as_one_process_does(
    fork: Popen, tmp_path: Path, reference_url: str
) -> None:
    # Ranks that share cores with other work answer slowly at times.
    slow = ["transfer.wait_timeout_s=120", "transfer.lease_s=60"]
    with running(tmp_path, [*FLOAT, TWO_RANKS, *slow], popen=fork) as front:
        check(front, reference_url)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_second_runner_answers_as_one_process_does(tmp_path: Path, reference_url: str) -> None:
    with (
        forking(("tests.e2e.interpreted", *CPU_MODULES), ENV) as popen,
        running(tmp_path, [*FLOAT, *SETTINGS, *TWO_ENCODERS], env=ENV, popen=popen) as front,
    ):
        check(front, reference_url)
        # Each encode engine encodes a part; the runner asks the model for positions by itself.
        content = [frames(1, 8), ASK]
        answer = ask(front.url, content)
        assert answer.sources == ["transfer"] * 2
        assert_equal(answer, ask(reference_url, content))
        loaded = front.events("model.loaded", since_s=0)
        assert {each["instance"]: each["runner"] for each in loaded} == {
            "encode-0": 2,
            "encode-1": 2,
            "prefill_decode-0": 2,
        }
