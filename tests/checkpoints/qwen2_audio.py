"""Qwen2-Audio: clips of up to 30 s, 25 tokens a second."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2Config,
    WhisperFeatureExtractor,
)

from tests.checkpoints.dimensions import HIDDEN, language_model
from tests.checkpoints.tokens import build_tokenizer, chat_template
from tests.checkpoints.weights import write_checkpoint

SAMPLE_RATE = 16_000
_MEL_BINS = 32
_SPECIAL = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")


def build(folder: Path) -> None:
    """Write the checkpoint."""
    tokenizer = build_tokenizer(_SPECIAL, chat_template=chat_template(audio="".join(_SPECIAL)))
    audio = Qwen2AudioEncoderConfig(
        num_mel_bins=_MEL_BINS,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        d_model=HIDDEN,
    )
    text = Qwen2Config(**language_model(tokenizer))
    config = Qwen2AudioConfig(
        audio_config=audio,
        text_config=text,
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        tie_word_embeddings=False,
    )
    renamed = {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.": "",
    }
    write_checkpoint(folder, Qwen2AudioForConditionalGeneration(config), tokenizer, renamed)
    WhisperFeatureExtractor(
        feature_size=_MEL_BINS, sampling_rate=SAMPLE_RATE, processor_class="Qwen2AudioProcessor"
    ).save_pretrained(folder)
