"""LLaVA-OneVision: images in tiles (anyres), of several lengths, and videos."""

from __future__ import annotations

from pathlib import Path

from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, Qwen2Config

from tests.checkpoints.dimensions import PATCH, language_model, siglip
from tests.checkpoints.tokens import build_tokenizer, chat_template
from tests.checkpoints.weights import TOWER, write_checkpoint

TILE = 56
"""Pixels at the side of one tile: 4 × 4 patches."""
_GRID = [[TILE, TILE], [TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE]]


def build(folder: Path) -> None:
    """Write the checkpoint."""
    tokenizer = build_tokenizer(
        ("<image>", "<video>"), chat_template=chat_template(image="<image>", video="<video>")
    )
    vision = siglip(TILE)
    text = Qwen2Config(**language_model(tokenizer))
    config = LlavaOnevisionConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=_GRID,
        vision_aspect_ratio="anyres_max_4",
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    pixels = {
        "size": {"height": TILE, "width": TILE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "LlavaOnevisionProcessor",
    }
    write_checkpoint(
        folder,
        LlavaOnevisionForConditionalGeneration(config),
        tokenizer,
        TOWER,
        preprocessor_config={
            **pixels,
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": _GRID,
        },
        video_preprocessor_config={
            **pixels,
            "video_processor_type": "LlavaOnevisionVideoProcessor",
        },
        processor_config={
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": (TILE // PATCH) ** 2,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_4",
            "image_token": "<image>",
            "video_token": "<video>",
        },
    )
