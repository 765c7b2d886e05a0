"""LLaVA-NeXT (LLaVA-1.6) with the tower of CLIP: images in tiles, of several lengths."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
)

from tests.checkpoints.dimensions import HIDDEN, PATCH, language_model
from tests.checkpoints.tokens import build_tokenizer, chat_template
from tests.checkpoints.weights import TOWER, write_checkpoint

TILE = 56
"""Pixels at the side of one tile: 4 × 4 patches."""
_GRID = [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE]]
_IMAGE = "<image>"
_STRATEGY = "default"
"""Without the embedding of the class."""


def build(folder: Path) -> None:
    """Write the checkpoint."""
    tokenizer = build_tokenizer((_IMAGE,), chat_template=chat_template(image=_IMAGE))
    vision = CLIPVisionConfig(
        hidden_size=HIDDEN,
        intermediate_size=128,
        # The last one is not used.
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=TILE,
        patch_size=PATCH,
        projection_dim=HIDDEN,
    )
    config = LlavaNextConfig(
        vision_config=vision,
        text_config=LlamaConfig(**language_model(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids(_IMAGE),
        image_grid_pinpoints=_GRID,
        vision_feature_layer=-2,
        vision_feature_select_strategy=_STRATEGY,
        tie_word_embeddings=False,
    )
    write_checkpoint(
        folder,
        LlavaNextForConditionalGeneration(config),
        tokenizer,
        TOWER,
        preprocessor_config={
            "image_processor_type": "LlavaNextImageProcessor",
            "processor_class": "LlavaNextProcessor",
            "size": {"shortest_edge": TILE},
            "crop_size": {"height": TILE, "width": TILE},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_grid_pinpoints": _GRID,
        },
        processor_config={
            "processor_class": "LlavaNextProcessor",
            "patch_size": PATCH,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": _STRATEGY,
            "image_token": _IMAGE,
        },
    )
