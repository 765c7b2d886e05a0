"""Each kind of model, with items that the encode engine sends: as if encoded in one process.

The reference is the prefill+decode engine itself, without the encode engine: its own tower encodes
then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import NAMES
from tests.e2e.asking import TOLERANCE, Answer, ask, assert_equal, text
from tests.e2e.conftest import Split, encoders_drained, forget, running
from tests.e2e.modalities.parts import audio_url, frames, image, input_audio, video
from tests.forked import Popen

ASK = text("What is it?")
CHECKPOINT_S = 300.0

IMAGES: dict[str, list[dict[str, Any]]] = {
    "one image": [image(1), ASK],
    "three images and text between": [image(2), text("and"), image(3), image(4), ASK],
    "the same image twice": [text("Twice:"), image(5), image(5), ASK],
    "a wide and a tall image": [image(6, 112, 56), image(7, 56, 84), ASK],
}
VIDEOS: dict[str, list[dict[str, Any]]] = {
    "a video": [video(1), ASK],
    "two videos and an image": [video(2), text("and"), video(3), image(8), ASK],
    "frames of a video": [frames(4), ASK],
    "the same video twice": [video(5), video(5), ASK],
}
VIDEOS_OF_TWO_LENGTHS = {"a long and a short video": [video(6), video(7, 4), ASK]}
"""vLLM 0.32 ends when LLaVA-OneVision has to encode two such in one step, in one process too."""
CLIPS: dict[str, list[dict[str, Any]]] = {
    "one clip": [input_audio(1), ASK],
    "two clips": [input_audio(2), text("and"), audio_url(3, 2.5), ASK],
    "the same clip twice": [input_audio(4), audio_url(4), ASK],
}
MIXED: dict[str, list[dict[str, Any]]] = {
    "an image, a clip and a video": [image(12), input_audio(7), frames(10, 2), ASK],
    "one after the other, and again": [
        audio_url(8, 0.5),
        image(13, 112, 56),
        text("and"),
        frames(11, 2),
        image(14),
        audio_url(8, 0.5),
        frames(11, 2),
        input_audio(9, 1.5),
        ASK,
    ],
}
CROPS: dict[str, list[dict[str, Any]]] = {
    "crops of images": [image(9, 112, 56), text("and"), image(10), image(11, 56, 84), ASK],
}
SHORTENED: dict[str, list[dict[str, Any]]] = {
    "shortened videos beside others": [
        input_audio(10),
        frames(12),
        image(15),
        frames(13),
        image(16),
        ASK,
    ],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "crops of images": {
        "mm_processor_kwargs": {
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 16,
            "pan_and_scan_max_num_crops": 2,
        }
    },
    "shortened videos beside others": {"media_io_kwargs": {"video": {"num_frames": 2}}},
}
"""Of some requests, for which the engine gives items names of its own."""
CONTENTS = {
    "qwen2_vl": IMAGES | VIDEOS | VIDEOS_OF_TWO_LENGTHS,
    "qwen2_5_vl": IMAGES | VIDEOS | VIDEOS_OF_TWO_LENGTHS,
    "qwen3_vl": IMAGES | VIDEOS | VIDEOS_OF_TWO_LENGTHS,
    "llava_next": IMAGES,
    "llava_onevision": IMAGES | VIDEOS,
    "gemma3": IMAGES | CROPS,
    "qwen2_audio": CLIPS,
    "qwen2_5_omni": MIXED | SHORTENED,
}
PAIRS = {
    "image": (image(20, 112, 112), image(21, 112, 112)),
    "video": (video(20), video(21)),
    "audio": (input_audio(20), input_audio(21)),
}
MODALITIES = {
    "qwen2_vl": ("image", "video"),
    "qwen2_5_vl": ("image", "video"),
    "qwen3_vl": ("image", "video"),
    "llava_next": ("image",),
    "llava_onevision": ("image", "video"),
    "gemma3": ("image",),
    "qwen2_audio": ("audio",),
    "qwen2_5_omni": ("image", "video", "audio"),
}


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


def checkpoint_of(name: str, folder: Path, fork: Popen) -> Path:
    """Return the checkpoint of a kind of model, made in a folder."""
    with (folder / "checkpoint.log").open("wb") as output:
        made = fork(
            [sys.executable, "-m", "tests.checkpoints", name, str(folder / name)],
            env=os.environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    assert made.wait(CHECKPOINT_S) == 0, (folder / "checkpoint.log").read_text()
    return folder / name


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
    request: pytest.FixtureRequest,
    fork: Popen,
    tmp_path_factory: pytest.TempPathFactory,
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
