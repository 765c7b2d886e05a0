from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import replace

import pytest

from epd_portable.demo import MODEL_DIR
from epd_portable.demo.run import Completion, difference

FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
}


def test_model_folder_is_complete_small_and_holds_nothing_else() -> None:
    assert {path.name for path in MODEL_DIR.iterdir()} == FILES
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 3_000_000


def test_all_weights_are_bfloat16_and_match_the_recorded_number() -> None:
    with (MODEL_DIR / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    assert {entry["dtype"] for entry in tensors.values()} == {"BF16"}
    record = json.loads((MODEL_DIR / "training.json").read_text())
    assert max(e["data_offsets"][1] for e in tensors.values()) == 2 * record["parameters"]
    assert record["parameters"] <= 1_400_000


def test_model_suits_two_ranks_and_long_contexts() -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    assert config["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    assert text["max_position_embeddings"] >= 8192
    assert text["num_key_value_heads"] % 2 == 0
    assert vision["num_heads"] % 2 == 0
    head_dim = text["hidden_size"] // text["num_attention_heads"]
    assert sum(text["rope_scaling"]["mrope_section"]) == head_dim // 2


def test_pages_name_the_image_size_and_the_recorded_score() -> None:
    preprocessor = json.loads((MODEL_DIR / "preprocessor_config.json").read_text())
    assert (preprocessor["min_pixels"], preprocessor["max_pixels"]) == (3136, 401_408)
    last = json.loads((MODEL_DIR / "training.json").read_text())["history"][-1]
    assert min(last["exact_match"].values()) >= 0.99


def test_importing_the_model_folder_and_pictures_needs_no_torch() -> None:
    code = (
        "import sys, epd_portable.demo, epd_portable.demo.pictures; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- what the demo calls equal ---------------------------------------------------------------------

SPLIT = Completion(
    text="a b", tokens=("a", "b"), logprobs=(-0.1, -0.2), item={"source": "transfer"}, latency_s=1.0
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"logprobs": (-0.1, -0.25)}, ""),
        ({"tokens": ("a", "c"), "text": "a c"}, "tokens differ: 'a c' split, 'a b' in one process"),
        ({"logprobs": (-0.1, -0.4)}, "log-probabilities differ by 0.2000"),
        ({"item": {"source": "local"}}, "the item came from local, not from the encoder"),
        ({"item": {}}, "the item came from nowhere"),
    ],
)
def test_responses_are_equal_only_with_tokens_and_encoder(
    changes: dict[str, object], said: str
) -> None:
    found = difference(replace(SPLIT, **changes), SPLIT)  # type: ignore[arg-type]
    assert found.startswith(said) and bool(found) == bool(said)
