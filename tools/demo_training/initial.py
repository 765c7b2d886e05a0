"""The model before its first step, and the classifier that helps its vision tower along.

Two measures make minutes on one core enough. The patch embedding starts as a whitening of real
patches: plain areas would otherwise drown the outlines that tell a star from a cross. And the
tower is also trained directly, by a linear classifier that is thrown away afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import transformers
from transformers import Qwen2Tokenizer

from epd_portable.demo.pictures import COLOURS, COUNT_WORDS, SHAPES, TRAINING_SEEDS, Scene, draw
from tools.demo_training.blueprint import build_config
from tools.demo_training.lessons import patchify

_EMBEDDING_STD = 0.05
_WHITENING_PICTURES = 400
_WHITENING_FLOOR = 1e-4
"""Directions with less than this share of the strongest one's variance are not blown up further."""


def new_model(
    tokenizer: Qwen2Tokenizer, seed: int
) -> transformers.Qwen2_5_VLForConditionalGeneration:
    """Build an untrained float32 model; each matrix is scaled to the width of its input."""
    torch.manual_seed(seed)
    config = build_config(tokenizer)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).float()
    blocks = config.text_config.num_hidden_layers
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        std = _EMBEDDING_STD if "embed_tokens" in name else parameter[0].numel() ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight")):
            std /= math.sqrt(2 * blocks)
        torch.nn.init.normal_(parameter, std=std)
    embedding = model.model.visual.patch_embed.proj.weight
    embedding.data.copy_(_whitening(embedding.shape[0]).view_as(embedding))
    return model


class TowerClassifier(torch.nn.Module):
    """Tells a scene's four properties from the mean of a picture's tokens."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self._classes: dict[str, list[str]] = {
            "shape": list(SHAPES),
            "colour": list(COLOURS),
            "background": list(COLOURS),
            "count": list(COUNT_WORDS),
        }
        self._heads = torch.nn.ModuleDict(
            {name: torch.nn.Linear(hidden_size, len(c)) for name, c in self._classes.items()}
        )

    def loss(self, features: torch.Tensor, scenes: Sequence[Scene]) -> torch.Tensor:
        """Return the mean cross-entropy of the four properties.

        Args:
            features: ``(len(scenes), tokens, hidden_size)``.
            scenes: What the pictures show.
        """
        pooled = features.mean(dim=1)
        losses = []
        for name, classes in self._classes.items():
            labels = [
                scene.count - 1 if name == "count" else classes.index(getattr(scene, name))
                for scene in scenes
            ]
            losses.append(
                torch.nn.functional.cross_entropy(self._heads[name](pooled), torch.tensor(labels))
            )
        return torch.stack(losses).mean()


def _whitening(rows: int) -> torch.Tensor:
    """Return the ``rows`` strongest directions of real patches, each scaled to unit variance."""
    last = TRAINING_SEEDS.stop
    patches = patchify([draw(seed).image for seed in range(last - _WHITENING_PICTURES, last)])
    variances, directions = torch.linalg.eigh((patches.T @ patches / len(patches)).double())
    variances, directions = variances.flip(0)[:rows], directions.flip(1)[:, :rows]
    floor = _WHITENING_FLOOR * variances[0]
    whitening: torch.Tensor = (directions / (variances + floor).sqrt()).T.float()
    return whitening
