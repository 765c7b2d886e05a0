"""Gemma 3: an image's tokens stand between line breaks, and long images come in crops."""

from __future__ import annotations

from pathlib import Path

from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig

from tests.checkpoints.dimensions import language_model, siglip
from tests.checkpoints.tokens import build_tokenizer, chat_template
from tests.checkpoints.weights import TOWER, write_checkpoint

SIDE = 56
"""Pixels at the side of what the tower sees: 4 × 4 patches, pooled to 2 × 2 tokens."""
TOKENS = 4
_BEGIN_IMAGE, _END_IMAGE, _IMAGE = "<start_of_image>", "<end_of_image>", "<image_soft_token>"


def build(folder: Path) -> None:
    """Write the checkpoint."""
    tokenizer = build_tokenizer(
        (_BEGIN_IMAGE, _END_IMAGE, _IMAGE),
        # vLLM looks up line breaks in a row, which the real tokenizer has as one token each.
        words=[count * "\n" for count in (1, 2, 3, 4)],
        named={"boi_token": _BEGIN_IMAGE, "eoi_token": _END_IMAGE, "image_token": _IMAGE},
        chat_template=chat_template(image=_BEGIN_IMAGE),
    )
    vision = siglip(SIDE)
    text = Gemma3TextConfig(
        **language_model(tokenizer),
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=512,
        layer_types=["sliding_attention", "full_attention"],
    )
    config = Gemma3Config(
        vision_config=vision,
        text_config=text,
        mm_tokens_per_image=TOKENS,
        boi_token_index=tokenizer.convert_tokens_to_ids(_BEGIN_IMAGE),
        eoi_token_index=tokenizer.convert_tokens_to_ids(_END_IMAGE),
        image_token_index=tokenizer.convert_tokens_to_ids(_IMAGE),
        tie_word_embeddings=False,
    )
    write_checkpoint(
        folder,
        Gemma3ForConditionalGeneration(config),
        tokenizer,
        TOWER,
        preprocessor_config={
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": SIDE, "width": SIDE},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_seq_length": TOKENS,
        },
        processor_config={"processor_class": "Gemma3Processor", "image_seq_length": TOKENS},
    )
