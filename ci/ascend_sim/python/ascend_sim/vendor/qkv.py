"""Splitting, norm and rotation of query, key and value in one: text models of Qwen3-VL.

vllm-ascend has it as a Triton kernel, and registers it only where Triton works.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from ..dispatch import CpuKernel
from ..refusal import refuse, require
from ..registration import Namespace
from .norm import rms_norm
from .rotary import turn_heads

_NAME = "triton_split_qkv_rmsnorm_mrope"
_SCHEMA = (
    "(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos_sin, SymInt num_q_heads, "
    "SymInt num_kv_heads, SymInt head_size, float eps, SymInt[] mrope_section, "
    "bool is_interleaved, SymInt? rope_dim=None, Tensor? q_bias=None, Tensor? k_bias=None, "
    "bool has_gate=False) -> (Tensor, Tensor, Tensor, Tensor)"
)


def register(_: ModuleType) -> None:
    """Add the operator to ``torch.ops.vllm``; called once, after vllm-ascend's own were."""
    operators = Namespace("vllm", "FRAGMENT")
    operators.define(_NAME + _SCHEMA)
    operators.implement(_NAME, CpuKernel(f"vllm::{_NAME}", split_qkv_rmsnorm_mrope))


def split_qkv_rmsnorm_mrope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    eps: float,
    mrope_section: Sequence[int],
    is_interleaved: bool,
    rope_dim: int | None = None,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    has_gate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split, norm each head of query and key, and turn them; in float32 throughout.

    Args:
        qkv: ``(tokens, (num_q_heads + 2 * num_kv_heads) * head_size)``.
        q_weight: ``(head_size,)``.
        k_weight: ``(head_size,)``.
        cos_sin: ``(3, tokens, rope_dim)`` by time, height and width; cosines, then sines.
        num_q_heads: Heads of the query.
        num_kv_heads: Heads of key and value.
        head_size: Elements of a head.
        eps: Of the norm.
        mrope_section: How many angles go by time, height and width.
        is_interleaved: Angles take turns among the three, instead of standing in blocks.
        rope_dim: Elements of a head that are turned; all by default.
        q_bias: ``(head_size,)``, added after the norm.
        k_bias: The same for the key.
        has_gate: Refused.

    Returns:
        Query, key, value, and an empty tensor in place of the gate.
    """
    if has_gate:
        refuse(_NAME, "has_gate=True")
    if cos_sin.dim() != 3:
        refuse(_NAME, f"cos_sin of {cos_sin.dim()} dimensions")
    require(
        cos_sin.shape == (3, len(qkv), rope_dim or head_size),
        _NAME,
        f"cos_sin {tuple(cos_sin.shape)} for {len(qkv)} tokens and rope_dim {rope_dim}",
    )
    cos, sin = (
        _choose(angles, mrope_section, is_interleaved).repeat(1, 2)
        for angles in cos_sin.float().chunk(2, -1)
    )

    def head(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        heads = x.float().reshape(len(x), x.shape[1] // head_size, head_size)
        normed = rms_norm(heads, weight, eps)[0]
        if bias is not None:
            normed = normed + bias.float()
        return turn_heads(normed, cos, sin, "half").to(x.dtype).reshape(x.shape)

    kv_width = num_kv_heads * head_size
    query, key, value = torch.split(qkv, [num_q_heads * head_size, kv_width, kv_width], -1)
    return (
        head(query, q_weight, q_bias),
        head(key, k_weight, k_bias),
        value.clone(),
        qkv.new_empty(len(qkv), 0),
    )


def _choose(angles: torch.Tensor, section: Sequence[int], interleaved: bool) -> torch.Tensor:
    """Take every angle, ``(3, tokens, angles)``, from time, height or width."""
    require(
        len(section) == 3 and sum(section) == angles.shape[-1],
        _NAME,
        f"mrope_section {list(section)} for {angles.shape[-1]} angles",
    )
    if not interleaved:
        parts = torch.split(angles, list(section), -1)
        return torch.cat([part[axis] for axis, part in enumerate(parts)], -1)
    chosen = angles[0].clone()
    for axis in (1, 2):
        places = slice(axis, section[axis] * 3, 3)
        chosen[:, places] = angles[axis][:, places]
    return chosen
