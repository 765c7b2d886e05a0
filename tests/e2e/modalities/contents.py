"""Contents of requests for each kind of model, and the checkpoint of a kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.asking import text
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
    "crops of images": [image(9, 112, 56), text("and"), image(10), image(11, 56, 84), ASK]
}

SHORTENED: dict[str, list[dict[str, Any]]] = {
    "shortened videos beside others": [
        input_audio(10),
        frames(12),
        image(15),
        frames(13),
        image(16),
        ASK,
    ]
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
"""Arguments of some requests, for which the engine gives items names of its own."""

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
