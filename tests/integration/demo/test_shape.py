"""The untrained model of measurements: its size, and that its answers can be seen to arrive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd_portable.demo import MODEL_DIR
from epd_portable.platforms import torchvision_guard


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Here, and not in every process that collects this file: it takes two seconds.
    pytest.importorskip("transformers", reason="comes with an engine")
    from epd_portable.demo.shape import write_model

    torchvision_guard.install()
    made = tmp_path_factory.mktemp("shape")
    write_model(
        made, vision_layers=4, vision_size=64, text_layers=2, text_size=128, max_pixels=200_704
    )
    return made


def test_it_has_the_size_that_was_asked_for(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    vision, text = config["vision_config"], config["text_config"]
    assert (vision["depth"], vision["hidden_size"], vision["out_hidden_size"]) == (4, 64, 128)
    assert vision["fullatt_block_indexes"] == [0, 1, 2, 3]
    assert (text["num_hidden_layers"], text["hidden_size"], text["num_attention_heads"]) == (
        2,
        128,
        2,
    )
    # Together half of a head.
    assert sum(text["rope_scaling"]["mrope_section"]) * 2 == 64
    preprocessing = json.loads((folder / "preprocessor_config.json").read_text())
    assert preprocessing["max_pixels"] == 200_704


def test_it_never_says_what_has_no_text(folder: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoTokenizer

    from epd_portable.demo.shape import tokens_without_text

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)
    silent = tokens_without_text(tokenizer)
    assert {tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|image_pad|>")} < {
        *silent
    }
    assert tokenizer.convert_tokens_to_ids("a") not in silent
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
        (name,) = (each for each in names if "embed_tokens" in each)
        weights = tensors.get_tensor(name)
    assert str(weights.dtype) == "torch.bfloat16"
    zero = {index for index, row in enumerate(weights) if not row.any()}
    assert zero == set(silent)
