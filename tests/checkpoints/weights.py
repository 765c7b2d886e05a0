"""Random weights, the same at every call, under the names that published checkpoints use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPREAD = 0.3
"""Standard deviation of the weights: enough for the answers to depend on every item."""


TOWER = {"model.vision_tower.": "model.vision_tower.vision_model."}
"""Names of the tower in published checkpoints of models with CLIP or SigLIP."""


def write_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    renamed: Mapping[str, str],
    **settings: Mapping[str, Any],
) -> None:
    """Write tokenizer, configuration, weights and settings files of a model.

    transformers 5 names some weights otherwise than published checkpoints, which are what vLLM
    reads, do.

    Args:
        folder: Where to.
        model: Its present weights do not matter.
        tokenizer: Of the model.
        renamed: Beginnings of names, and what published checkpoints have there.
        settings: Content of files by their names without ``.json``.
    """
    tokenizer.save_pretrained(folder)
    for name, content in settings.items():
        text = json.dumps(content, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in model.state_dict().items():
        for begin, published in renamed.items():
            if name.startswith(begin):
                name = published + name.removeprefix(begin)
                break
        if not parameter.is_floating_point():
            tensors[name] = parameter
            continue
        values = torch.randn(parameter.shape, generator=generator) * SPREAD
        if parameter.dim() > 1 and "embed" not in name:
            values *= (8 / parameter[0].numel()) ** 0.5
        tensors[name] = values + ("norm" in name and name.endswith("weight"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
