"""Qwen2.5-Omni's thinker: images, videos and audio clips, and the sound of a video."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    Qwen2_5OmniConfig,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)

from tests.checkpoints.dimensions import HIDDEN, language_model
from tests.checkpoints.tokens import build_tokenizer, chat_template
from tests.checkpoints.weights import write_checkpoint

_MEL_BINS = 32
_NAMED = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_CELL = 28 * 28


def build(folder: Path) -> None:
    """Write the checkpoint."""
    tokenizer = build_tokenizer(
        tuple(_NAMED.values()),
        named=_NAMED,
        chat_template=chat_template(
            image="<|vision_bos|><|IMAGE|><|vision_eos|>",
            video="<|vision_bos|><|VIDEO|><|vision_eos|>",
            audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
        ),
    )
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _NAMED.items()}
    vision = {
        "depth": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": HIDDEN,
        "fullatt_block_indexes": [1],
    }
    audio = {
        "num_mel_bins": _MEL_BINS,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "d_model": HIDDEN,
        "output_dim": HIDDEN,
    }
    text = {
        **language_model(tokenizer),
        # Of the 16 pairs in a head: time, height and width.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [4, 6, 6],
        },
    }
    thinker = Qwen2_5OmniThinkerConfig(
        vision_config=vision,
        audio_config=audio,
        text_config=text,
        image_token_index=ids["image_token"],
        audio_token_index=ids["audio_token"],
        video_token_index=ids["video_token"],
        audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        pad_token_id=text["pad_token_id"],
        tie_word_embeddings=False,
    )
    write_checkpoint(
        folder,
        Qwen2_5OmniThinkerForConditionalGeneration(thinker),
        tokenizer,
        {"": "thinker."},
        preprocessor_config={
            **WhisperFeatureExtractor(feature_size=_MEL_BINS).to_dict(),
            "processor_class": "Qwen2_5OmniProcessor",
            "image_processor_type": "Qwen2VLImageProcessor",
            "video_processor_type": "Qwen2VLVideoProcessor",
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "min_pixels": 4 * _CELL,
            "max_pixels": 64 * _CELL,
        },
    )
    whole = Qwen2_5OmniConfig(thinker_config=thinker.to_dict(), enable_audio_output=False)
    whole.architectures = ["Qwen2_5OmniModel"]
    whole.save_pretrained(folder)
