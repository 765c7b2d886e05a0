"""Dimensions that the small models have in common."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast, SiglipVisionConfig

from tests.checkpoints.tokens import BEGIN, END, PAD

HIDDEN = 64
PATCH = 14
"""Pixels at the side of a patch of `siglip`."""


def language_model(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the fields that the configurations of all language models know."""
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
        "bos_token_id": tokenizer.convert_tokens_to_ids(BEGIN),
        "eos_token_id": tokenizer.convert_tokens_to_ids(END),
    }


def siglip(side: int) -> SiglipVisionConfig:
    """Return a tower that sees squares of ``side`` pixels."""
    return SiglipVisionConfig(
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=side,
        patch_size=PATCH,
        vision_use_head=False,
    )
