"""Writes an untrained model of any size: ``python -m epd_portable.demo.shape FOLDER ...``.

The architecture, tokenizer and image preprocessing are those of the demo model; only the size
differs, and the weights are random. What an engine computes for a request takes as long as with
trained weights, so measurements that must not depend on a download are made with it. Its answers
mean nothing.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import transformers

from epd_portable.demo.blueprint import (
    Dimensions,
    build_config,
    build_tokenizer,
    use_published_spelling,
    write_preprocessing,
)
from epd_portable.platforms import torchvision_guard

HEAD_SIZE = 64
_CELL = 64
_STD = 0.02


def dimensions(
    *, vision_layers: int, vision_size: int, text_layers: int, text_size: int
) -> Dimensions:
    """Return a model in about the proportions of Qwen2.5-VL.

    The feed-forward layers of the language model are narrower, so that one core keeps up with a
    few requests a second.

    Args:
        vision_layers: Blocks of the vision tower.
        vision_size: Its width, a multiple of 64.
        text_layers: Layers of the language model.
        text_size: Its width, a multiple of 128, so that there are heads for two ranks.
    """
    return Dimensions(
        vision_layers=vision_layers,
        vision_size=vision_size,
        vision_heads=vision_size // HEAD_SIZE,
        vision_ffn=_rounded(vision_size * 8 / 3),
        text_layers=text_layers,
        text_size=text_size,
        text_heads=text_size // HEAD_SIZE,
        text_kv_heads=2,
        text_ffn=2 * text_size,
    )


def write_model(folder: Path, size: Dimensions, *, max_pixels: int, seed: int = 0) -> None:
    """Write a checkpoint with random weights in bfloat16.

    Args:
        folder: Where to; made if it is not there.
        size: Of the model.
        max_pixels: Larger pictures are scaled down to this.
        seed: Of the weights.
    """
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    config = build_config(tokenizer, size)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=_STD)
    # The same weights are its output layer: what has no text of its own is never the likeliest,
    # so every token of an answer can be seen to arrive.
    with torch.no_grad():
        model.get_input_embeddings().weight[tokens_without_text(tokenizer)] = 0
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    use_published_spelling(folder)
    write_preprocessing(folder, config, max_pixels=max_pixels)


def tokens_without_text(tokenizer: transformers.Qwen2Tokenizer) -> list[int]:
    """Return the tokens that are special, or parts of a character."""
    special = set(tokenizer.all_special_ids)
    return [
        token
        for token in range(len(tokenizer))
        if token in special or "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([token])
    ]


def _rounded(width: float) -> int:
    return math.ceil(width / _CELL) * _CELL


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description="Write an untrained model of a given size.")
    parser.add_argument("folder", type=Path)
    for name in ("vision-layers", "vision-size", "text-layers", "text-size", "max-pixels"):
        parser.add_argument(f"--{name}", type=int, required=True)
    asked = parser.parse_args()
    torchvision_guard.install()
    size = dimensions(
        vision_layers=asked.vision_layers,
        vision_size=asked.vision_size,
        text_layers=asked.text_layers,
        text_size=asked.text_size,
    )
    write_model(asked.folder, size, max_pixels=asked.max_pixels)


if __name__ == "__main__":
    main()
