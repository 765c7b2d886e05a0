"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images and videos; Qwen3-VL with DeepStack and timestamps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.checkpoints.dimensions import HIDDEN, language_model
from tests.checkpoints.tokens import build_tokenizer, chat_template
from tests.checkpoints.weights import write_checkpoint

_SPECIAL = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def build_qwen2_vl(folder: Path) -> None:
    """Write a Qwen2-VL checkpoint: as Qwen2.5-VL, but without windows and without times."""
    tokenizer = _tokenizer()
    vision = {
        "depth": 2,
        "embed_dim": HIDDEN,
        "hidden_size": HIDDEN,
        "mlp_ratio": 2,
        "num_heads": 4,
        "patch_size": 14,
    }
    text = _text("qwen2_vl_text", tokenizer, [4, 6, 6])
    config = Qwen2VLConfig(vision_config=vision, text_config=text, **_ids(tokenizer))
    _write(folder, tokenizer, Qwen2VLForConditionalGeneration(config), "Qwen2VLProcessor", 14)


def build_qwen2_5_vl(folder: Path) -> None:
    """Write a Qwen2.5-VL checkpoint: patches of 14 pixels, 2 × 2 of them to a token."""
    tokenizer = _tokenizer()
    vision = {
        "depth": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": HIDDEN,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    text = _text("qwen2_5_vl_text", tokenizer, [4, 6, 6])
    config = Qwen2_5_VLConfig(vision_config=vision, text_config=text, **_ids(tokenizer))
    _write(folder, tokenizer, Qwen2_5_VLForConditionalGeneration(config), "Qwen2_5_VLProcessor", 14)


def build_qwen3_vl(folder: Path) -> None:
    """Write a Qwen3-VL checkpoint whose encoder's outputs are three times the hidden size wide."""
    tokenizer = _tokenizer()
    vision = {
        "depth": 3,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": HIDDEN,
        "patch_size": 16,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    text = {**_text("qwen3_vl_text", tokenizer, [6, 5, 5]), "head_dim": 32}
    config = Qwen3VLConfig(vision_config=vision, text_config=text, **_ids(tokenizer))
    _write(folder, tokenizer, Qwen3VLForConditionalGeneration(config), "Qwen3VLProcessor", 16)


def _tokenizer() -> PreTrainedTokenizerFast:
    template = chat_template(image=_IMAGE, video=_VIDEO)
    return build_tokenizer(_SPECIAL, chat_template=template)


def _text(kind: str, tokenizer: PreTrainedTokenizerFast, sections: list[int]) -> dict[str, Any]:
    return {
        "model_type": kind,
        **language_model(tokenizer),
        "num_hidden_layers": 3,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            # Of the 16 pairs in a head: time, height and width.
            "mrope_section": sections,
            "mrope_interleaved": kind.startswith("qwen3"),
        },
    }


def _ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        "tie_word_embeddings": False,
    }


def _write(
    folder: Path, tokenizer: PreTrainedTokenizerFast, model: Any, processor: str, patch_size: int
) -> None:
    cell = (2 * patch_size) ** 2
    pixels = {
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "processor_class": processor,
    }
    # Most pixels of an image, and of all frames of a video: what engines profile at their start.
    limits = {"shortest_edge": 4 * cell, "longest_edge": 64 * cell}
    image = {**pixels, "image_processor_type": "Qwen2VLImageProcessor", "size": limits}
    kind = "Qwen3VLVideoProcessor" if processor.startswith("Qwen3") else "Qwen2VLVideoProcessor"
    video = {**pixels, "video_processor_type": kind, "size": limits}
    write_checkpoint(
        folder,
        model,
        tokenizer,
        {},
        preprocessor_config=image,
        video_preprocessor_config={**video, "min_frames": 2, "max_frames": 8},
    )
