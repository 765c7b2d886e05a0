"""Models of true size without their weights, for engines with ``load_format: dummy``.

``python -m ci.true_shapes FOLDER 3b 7b cpu small`` writes a folder for each: the configuration of
Qwen2.5-VL, its limit of an image's pixels, and the demo model's tokenizer with as many tokens as
the real one has, each with a text by which its arrival is seen. ``cpu`` is smaller: one core keeps
up with a few requests per second. Needs the standard library only.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parent.parent / "epd_portable" / "demo" / "model"
COPIED = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
MAX_PIXELS = {"cpu": 200_704}
"""Most pixels of an image, by model; larger images are scaled down."""
MAX_PIXELS_OF_QWEN = 12_845_056
"""Side of an image for Qwen2.5-VL: 1008 × 1008 pixels are kept, and are 1296 tokens."""

# Configuration files of Qwen/Qwen2.5-VL-3B-Instruct and -7B-Instruct.
TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
TOWER_OF_CPU = {
    "depth": 12,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_heads": 6,
    "fullatt_block_indexes": [2, 5, 8, 11],
}
TEXT = {"max_position_embeddings": 128000, "rope_theta": 1000000.0}
SECTIONS = {64: [8, 12, 12], 128: [16, 24, 24]}
"""Parts of half a head for time, height and width, by the head's size."""
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)
LANGUAGE = {
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "cpu": (512, 1024, 6, 8, 2, 8192, True),
}
"""`SIZES` of the language models; any other name has those of the demo model."""


def write(folder: Path, size: str) -> None:
    """Write the files of one model."""
    sizes = LANGUAGE.get(size)
    tower: dict[str, Any] = {}
    text: dict[str, Any] = {}
    if sizes:
        tower = TOWER_OF_CPU if size == "cpu" else TOWER
        text = {**TEXT, **dict(zip(SIZES, sizes, strict=True))}
        section = SECTIONS[text["hidden_size"] // text["num_attention_heads"]]
        text["rope_scaling"] = {"type": "mrope", "mrope_section": section}
    folder.mkdir(parents=True, exist_ok=True)
    config, pictures, tokenizer = (
        json.loads((DEMO / f"{name}.json").read_text("utf-8"))
        for name in ("config", "preprocessor_config", "tokenizer")
    )
    config["text_config"] |= text
    del config["text_config"]["layer_types"]
    config["vision_config"] |= {**tower, "out_hidden_size": config["text_config"]["hidden_size"]}
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"]
    pictures["max_pixels"] = MAX_PIXELS.get(size, MAX_PIXELS_OF_QWEN)
    known = tokenizer["model"]["vocab"]
    first = 1 + max(known.values())
    known |= {f"w{number}": number for number in range(first, config["text_config"]["vocab_size"])}
    for name, content in (
        ("config", config),
        ("preprocessor_config", pictures),
        ("tokenizer", tokenizer),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    for name in COPIED:
        shutil.copyfile(DEMO / name, folder / name)


def main() -> None:
    """Write those that the command line names."""
    folder, *sizes = sys.argv[1:]
    for size in sizes:
        write(Path(folder, size), size)


if __name__ == "__main__":
    main()
