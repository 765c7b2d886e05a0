"""Root mean square norms."""

from __future__ import annotations

import torch

from ..refusal import refuse, require


def rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm over the last dimension, and 1 / rms in float32 as ``(..., 1)``."""
    if gamma.dim() != 1:
        refuse("npu_rms_norm", f"gamma of {gamma.dim()} dimensions")
    require(
        gamma.shape[0] == x.shape[-1],
        "npu_rms_norm",
        f"gamma of {gamma.shape[0]} elements for rows of {x.shape[-1]}",
    )
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return norm and 1 / rms of ``x1 + x2``, and the sum itself, rounded before the norm."""
    require(
        x1.shape == x2.shape and x1.dtype == x2.dtype,
        "npu_add_rms_norm",
        f"x1 is {x1.dtype} {tuple(x1.shape)}, x2 {x2.dtype} {tuple(x2.shape)}",
    )
    total = x1 + x2
    normed, rstd = rms_norm(total, gamma, epsilon)
    return normed, rstd, total


def add_rms_norm_bias(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same as :func:`add_rms_norm`, with ``beta`` added to the rounded norm."""
    normed, rstd, total = add_rms_norm(x1, x2, gamma, epsilon)
    return (normed if beta is None else normed + beta), rstd, total
