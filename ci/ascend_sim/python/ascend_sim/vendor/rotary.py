"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..refusal import refuse, require

_INTERLEAVED = ("interleave", "interleaved")


def rotate(x: torch.Tensor, mode: str) -> torch.Tensor:
    """Turn pairs of the last dimension by 90 degrees.

    Args:
        x: ``(..., dim)``, of an even ``dim``.
        mode: ``half`` pairs an element with the one half a row on; ``interleave`` and
            ``interleaved`` pair neighbours.
    """
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    if mode not in _INTERLEAVED:
        refuse("rotary embedding", f"rotary_mode={mode!r}")
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def rotary_mul(
    x: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate_matrix: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x * r1 + rotate(x) * r2``; r1 and r2 broadcast over ``x``, but in its last dim."""
    if rotate_matrix is not None:
        refuse("npu_rotary_mul", "rotate (a matrix)")
    require(
        r1.shape == r2.shape and r1.dim() == x.dim() and r1.shape[-1] == x.shape[-1],
        "npu_rotary_mul",
        f"x {tuple(x.shape)}, r1 {tuple(r1.shape)}, r2 {tuple(r2.shape)}",
    )
    wide = x.float()
    return (wide * r1.float() + rotate(wide, rotary_mode) * r2.float()).to(x.dtype)


def mrope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str = "half",
    cache_mode: str = "default",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn query and key by their positions.

    Args:
        positions: ``(tokens,)``, or ``(3, tokens)`` of time, height and width.
        query: ``(tokens, heads * head_size)``.
        key: ``(tokens, kv_heads * head_size)``.
        cos_sin_cache: ``(max_position, rotary_dim)``, cosines then sines; a ``rotary_dim`` below
            ``head_size`` leaves the rest of each head as it is.
        head_size: Elements of a head.
        mrope_section: With 3 positions: how many of the ``rotary_dim / 2`` angles go by each.
        rotary_mode: As for :func:`rotate`.
        cache_mode: ``default``: sections are blocks.
    """
    if cache_mode != "default":
        refuse("npu_mrope", f"cache_mode={cache_mode!r}")
    cos, sin = cos_sin_cache[positions].float().chunk(2, -1)
    if positions.dim() == 2:
        sections = list(mrope_section or ())
        require(
            len(sections) == len(positions) and sum(sections) == cos.shape[-1],
            "npu_mrope",
            f"mrope_section {sections} for {len(positions)} positions and {cos.shape[-1]} angles",
        )
        cos, sin = _by_section(cos, sections), _by_section(sin, sections)
    cos, sin = _both_of_a_pair(cos, rotary_mode), _both_of_a_pair(sin, rotary_mode)

    def turn(x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(x.shape[0], x.shape[1] // head_size, head_size)
        return turn_heads(heads.float(), cos, sin, rotary_mode).to(x.dtype).reshape(x.shape)

    return turn(query), turn(key)


def turn_heads(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str
) -> torch.Tensor:
    """Turn the first ``rotary_dim`` elements of every head, leave the rest.

    Args:
        heads: ``(tokens, heads, head_size)``.
        cos: ``(tokens, rotary_dim)``.
        sin: As ``cos``.
        mode: As for :func:`rotate`.
    """
    turned, rest = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
    return torch.cat((turned * cos[:, None] + rotate(turned, mode) * sin[:, None], rest), -1)


def _by_section(angles: torch.Tensor, sections: list[int]) -> torch.Tensor:
    """Take each section of the angles, ``(3, tokens, angles)``, from its own position."""
    parts = torch.split(angles, sections, -1)
    return torch.cat([part[index] for index, part in enumerate(parts)], -1)


def _both_of_a_pair(angles: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "half":
        return torch.cat((angles, angles), -1)
    return angles.repeat_interleave(2, -1)
