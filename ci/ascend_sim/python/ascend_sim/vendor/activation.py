"""Activations."""

from __future__ import annotations

import torch

from ..refusal import require

_FAST_GELU_SLOPE = 1.702


def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return ``silu(first half) * second half`` along ``dim``."""
    require(x.shape[dim] % 2 == 0, "npu_swiglu", f"dimension {dim} of {x.shape[dim]} is odd")
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def fast_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return ``x * sigmoid(1.702 x)``."""
    wide = x.float()
    return (wide * torch.sigmoid(_FAST_GELU_SLOPE * wide)).to(x.dtype)
