"""Writes an untrained model of any size: ``python -m epd_portable.demo.shape FOLDER ...``.

Architecture, tokenizer and image preprocessing are those of the demo model; the size differs, and
the weights are random. An engine computes as long as with trained weights, so measurements that
must not depend on a download are made with it. Its answers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from epd_portable.demo import MODEL_DIR
from epd_portable.platforms import torchvision_guard

HEAD_SIZE = 64
_FFN_MULTIPLE = 64
_STD = 0.02
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    "generation_config.json",
)


def write_model(
    folder: Path,
    *,
    vision_layers: int,
    vision_size: int,
    text_layers: int,
    text_size: int,
    max_pixels: int,
) -> None:
    """Write a checkpoint with random weights in bfloat16, in about Qwen2.5-VL's proportions.

    The feed-forward layers of the language model are narrower, so that one core keeps up with a
    few requests per second. The width of the vision tower is a multiple of 64, that of the language
    model of 128, so that there are heads for two ranks; larger pictures are scaled down.
    """
    config = _read("config.json")
    config["vision_config"] |= {
        "depth": vision_layers,
        "hidden_size": vision_size,
        "num_heads": vision_size // HEAD_SIZE,
        "intermediate_size": math.ceil(vision_size * 8 / 3 / _FFN_MULTIPLE) * _FFN_MULTIPLE,
        "out_hidden_size": text_size,
        "fullatt_block_indexes": _whole_picture_layers(vision_layers),
    }
    text = config["text_config"]
    del text["layer_types"]
    text |= {
        "num_hidden_layers": text_layers,
        "hidden_size": text_size,
        "num_attention_heads": text_size // HEAD_SIZE,
        "num_key_value_heads": 2,
        "intermediate_size": 2 * text_size,
        # One section each for time, height and width: together half of a head.
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    }
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig.from_dict(config)
    )
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=_STD)
    # The same weights are its output layer: what has no text of its own is never the likeliest,
    # so every token of an answer can be seen to arrive.
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)
    with torch.no_grad():
        model.get_input_embeddings().weight[tokens_without_text(tokenizer)] = 0
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    for name in _COPIED:
        shutil.copyfile(MODEL_DIR / name, folder / name)
    preprocessing = {**_read("preprocessor_config.json"), "max_pixels": max_pixels}
    for name, content in (("config", config), ("preprocessor_config", preprocessing)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def tokens_without_text(tokenizer: Any) -> list[int]:
    """Return the tokens that are special, or parts of a character."""
    special = set(tokenizer.all_special_ids)
    return [
        token
        for token in range(len(tokenizer))
        if token in special or "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([token])
    ]


def _whole_picture_layers(layers: int) -> list[int]:
    """Return the blocks that look beyond a window: the last of each quarter, if there are any."""
    quarter, rest = divmod(layers, 4)
    return [layers - 1] if rest else list(range(quarter - 1, layers, quarter))


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MODEL_DIR / name).read_text(encoding="utf-8"))
    return content


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description="Write an untrained model of a given size.")
    parser.add_argument("folder", type=Path)
    for name in ("vision-layers", "vision-size", "text-layers", "text-size", "max-pixels"):
        parser.add_argument(f"--{name}", type=int, required=True)
    torchvision_guard.install()
    write_model(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
