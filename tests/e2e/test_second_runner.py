"""All instances on vLLM's second model runner, on the CPU: equal to one process on the first.

Items travel by NIXL, over TCP; each of two encode engines encodes a part of a video.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.e2e.asking import ask, assert_equal
from tests.e2e.cases import ASK
from tests.e2e.conftest import CPU_MODULES, VIDEOS, Pair, forking, running
from tests.e2e.equality import FloatSmoke
from tests.e2e.modalities.parts import frames

pytestmark = [
    pytest.mark.needs_nixl,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

ENV = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
SETTINGS = (
    "engine_args.dtype=float32",
    "engine_args.skip_mm_profiling=true",
    f"engine_args.limit_mm_per_prompt={json.dumps(VIDEOS['limit_mm_per_prompt'])}",
    "instances.encode.count=2",
    "transfer.path=nixl",
    "transfer.pool_bytes=16MiB",
    "transfer.lease_s=60",
    "transfer.wait_timeout_s=120",
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, reference_url: str) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("second")
    with (
        forking(("tests.e2e.interpreted", *CPU_MODULES), ENV) as popen,
        running(folder, SETTINGS, env=ENV, popen=popen) as split,
    ):
        yield Pair(split=split, reference_url=reference_url)


class TestSecondRunner(FloatSmoke):
    """Items travel by the hooks of the second runner, not by the mixins of the first."""

    def test_instances_have_the_second_runner(self, pair: Pair) -> None:
        loaded = pair.split.events("model.loaded", since_s=0)
        assert {e["instance"]: e["runner"] for e in loaded} == {
            "encode-0": 2,
            "encode-1": 2,
            "prefill_decode-0": 2,
        }
        [encoder] = [e["parameters"] for e in loaded if e["instance"] == "encode-0"]
        assert (encoder["language_model"], encoder["visual"] > 0) == (0, True)

    def test_video_of_two_parts_gets_the_response_of_one_process(self, pair: Pair) -> None:
        """The runner asks the model for positions by itself."""
        content = [frames(1, 8), ASK]
        answer = ask(pair.split.url, content)
        assert_equal(answer, ask(pair.reference_url, content))
        assert answer.sources == ["transfer"] * 2
        assert len({item["encoder"] for item in answer.items}) == 2

    def test_items_travel_by_nixl(self, pair: Pair) -> None:
        assert {each["path"] for each in pair.split.events("transfer.begun")} == {"nixl"}
