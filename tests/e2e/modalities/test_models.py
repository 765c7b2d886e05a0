"""Each kind of model, with items that the encode engine sends: as if encoded in one process.

The reference is the prefill+decode engine itself, without the encode engine: its own tower encodes
then, a block in each step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.checkpoints import NAMES
from tests.e2e.asking import TOLERANCE, Answer, ask, assert_equal
from tests.e2e.conftest import Split, encoders_drained, forget, running
from tests.e2e.modalities.contents import ASK, CONTENTS, MODALITIES, PAIRS, SETTINGS, checkpoint_of
from tests.forked import Popen


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model in an encode and a prefill+decode engine."""

    name: str
    split: Split

    def ask(self, content: Any, **more: Any) -> Answer:
        return ask(self.split.url, content, **self._fixed(), **more)

    def ask_alone(self, content: Any, **more: Any) -> Answer:
        """Ask the prefill+decode engine, which has to encode every item then."""
        forget(self.split)
        with encoders_drained(self.split):
            return self.ask(content, **more)

    def _fixed(self) -> dict[str, Any]:
        return {"model": self.name, "max_tokens": 8, "ignore_eos": True}


SHOWN_ELSEWHERE = {"qwen2_vl", "qwen2_5_vl", "llava_next", "qwen2_audio"}
"""The kind of the demo's model, which other modules serve, and that before it; one whose images
come in tiles as `llava_onevision`'s, from another tower; and one whose clips `qwen2_5_omni` takes
too, with the same fields."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.full] * (name in SHOWN_ELSEWHERE)) for name in NAMES
    ],
)
def served(
    request: pytest.FixtureRequest, fork: Popen, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    name = request.param
    folder = tmp_path_factory.mktemp("model")
    checkpoint = checkpoint_of(name, folder, fork)
    limits = json.dumps(dict.fromkeys(MODALITIES[name], 4))
    settings = [
        f"model={checkpoint}",
        "engine_args.dtype=float32",
        "engine_args.max_model_len=2048",
        "engine_args.skip_mm_profiling=true",
        "engine_args.trust_request_mm_kwargs=true",
        f"engine_args.limit_mm_per_prompt={limits}",
        "transfer.pool_bytes=16MiB",
        # A slow machine must not make the other instance encode.
        "transfer.lease_s=30",
        "transfer.wait_timeout_s=60",
        "env.VLLM_SERVER_DEV_MODE='1'",
        "instances.prefill_decode.engine_args.worker_cls=tests.e2e.workers.ChunkedPDWorker",
    ]
    with running(folder, settings, popen=fork) as split:
        yield Served(name=name, split=split)


def test_answers_with_transferred_items_are_those_of_one_process(
    served: Served, subtests: pytest.Subtests
) -> None:
    for title, content in CONTENTS[served.name].items():
        with subtests.test(title):
            settings = SETTINGS.get(title, {})
            split = served.ask(content, **settings)
            reference = served.ask_alone(content, **settings)
            names = [[item["mm_hash"] for item in each.items] for each in (split, reference)]
            assert names[0] == names[1] != []
            assert set(split.sources) == {"transfer"}
            assert set(reference.sources) == {"local"}
            assert_equal(split, reference)


def test_response_changes_with_the_item(served: Served) -> None:
    """Otherwise equality would prove nothing."""
    for modality in MODALITIES[served.name]:
        one, other = (served.ask([item, ASK]) for item in PAIRS[modality])
        with pytest.raises(AssertionError):
            assert_equal(one, other, tolerance=10 * TOLERANCE)
