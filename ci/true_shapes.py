"""Models of true size without their weights, for engines with ``load_format: dummy``.

``python -m ci.true_shapes FOLDER 3b 7b small`` writes a folder for each: the configuration of
Qwen2.5-VL, its limit of a picture's pixels, and the demo model's tokenizer with as many tokens as
the real one has, each with a text by which its arrival is seen. Needs the standard library only.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "epd_portable" / "demo" / "model"
COPIED = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
MAX_PIXELS = 12_845_056
"""Of Qwen2.5-VL: a picture of 1008 × 1008 pixels keeps them, and is 1296 tokens."""

# Configuration files of Qwen/Qwen2.5-VL-3B-Instruct and -7B-Instruct.
TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
TEXT = {
    "max_position_embeddings": 128000,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)
LANGUAGE = {
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}
"""`SIZES` of the language models; any other name has those of the demo model."""


def write(folder: Path, size: str) -> None:
    """Write the files of one model."""
    sizes = LANGUAGE.get(size)
    tower, text = (TOWER, TEXT | dict(zip(SIZES, sizes, strict=True))) if sizes else ({}, {})
    folder.mkdir(parents=True, exist_ok=True)
    config, pictures, tokenizer = (
        json.loads((DEMO / f"{name}.json").read_text("utf-8"))
        for name in ("config", "preprocessor_config", "tokenizer")
    )
    config["text_config"] |= text
    del config["text_config"]["layer_types"]
    config["vision_config"] |= {**tower, "out_hidden_size": config["text_config"]["hidden_size"]}
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"]
    pictures["max_pixels"] = MAX_PIXELS
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
