"""The untrained parts of the demo model: tokenizer, configuration and image preprocessing.

The architecture is Qwen2.5-VL as transformers and vLLM know it, only smaller. Head counts are
even, so that two tensor-parallel ranks can share the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from tools.demo_training.dialogues import vocabulary_corpus

PATCH_SIZE = 14
MERGE_SIZE = 2
TEMPORAL_PATCH_SIZE = 2
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)

MIN_PIXELS = 56 * 56
MAX_PIXELS = 512 * 28 * 28
"""Largest picture kept as it is: 512 image tokens, which bounds what engines profile."""

_MAX_VOCABULARY = 640
_SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' or 'video' in part %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> Qwen2Tokenizer:
    """Train a byte-level BPE on the words of the dialogues; any other text falls back to bytes."""
    bpe = Tokenizer(models.BPE())
    # As Qwen2Tokenizer itself normalizes and splits.
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MAX_VOCABULARY,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(vocabulary_corpus(), trainer)
    learnt = json.loads(bpe.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(pair) for pair in learnt["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=list(_SPECIAL_TOKENS[1:]),
        chat_template=_CHAT_TEMPLATE,
        model_max_length=8192,
    )


def build_config(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLConfig:
    """Return the configuration of the model: 1.4 million parameters."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in _SPECIAL_TOKENS}
    vision: dict[str, Any] = {
        "depth": 3,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "out_hidden_size": 128,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        "window_size": 112,
        # Beyond a window only the last layer looks.
        "fullatt_block_indexes": [2],
        "hidden_act": "silu",
        "in_channels": 3,
        "tokens_per_second": 2,
    }
    text: dict[str, Any] = {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": 128,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        # One section each for time, height and width: together half of a head.
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": True,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    config = Qwen2_5_VLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    return config


def use_published_spelling(folder: Path) -> None:
    """Rewrite saved settings as published Qwen2.5-VL checkpoints spell them.

    transformers 5 reads this spelling as well as its own; transformers 4 reads only this one.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config["text_config"].pop("rope_parameters")
    config["text_config"]["rope_theta"] = rope["rope_theta"]
    config["text_config"]["rope_scaling"] = {
        "type": "mrope",
        "mrope_section": rope["mrope_section"],
    }
    config["torch_dtype"] = config.pop("dtype")
    _write_json(path, config)
    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["additional_special_tokens"] = tokenizer.pop("extra_special_tokens")
    _write_json(path, tokenizer)


def write_preprocessing(folder: Path, config: Qwen2_5_VLConfig) -> None:
    """Write the image preprocessing and the (greedy) generation defaults into ``folder``."""
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        "merge_size": MERGE_SIZE,
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
    }
    generation = {
        "bos_token_id": config.text_config.bos_token_id,
        "eos_token_id": config.text_config.eos_token_id,
        "pad_token_id": config.text_config.pad_token_id,
        "do_sample": True,
        "top_k": 1,
    }
    _write_json(folder / "preprocessor_config.json", preprocessor)
    _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
