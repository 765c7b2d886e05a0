"""Random weights, the same at every call, under the names that published checkpoints use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

SPREAD = 0.3
"""Standard deviation of the weights: enough for the answers to depend on every item."""


def save_random(model: PreTrainedModel, folder: Path, renamed: Mapping[str, str]) -> None:
    """Write configuration and weights of a model.

    transformers 5 names some weights otherwise than published checkpoints, which are what vLLM
    reads, do.

    Args:
        model: Its present weights do not matter.
        folder: Where to.
        renamed: Beginnings of names, and what published checkpoints have there.
    """
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


def write_json(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write one settings file of a checkpoint."""
    (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
