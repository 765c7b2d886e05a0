"""Writes to the paged key-value cache."""

from __future__ import annotations

import torch

from ..refusal import refuse, require

_NAME = "npu_scatter_pa_kv_cache"


def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str = "PA_NZ",
) -> None:
    """Write the keys and values of tokens into their slots.

    Args:
        key: ``(tokens, kv_heads, head_size)``.
        value: As ``key``.
        key_cache: ``(blocks, block_size, kv_heads, head_size)``; written.
        value_cache: As ``key_cache``.
        slot_mapping: ``(tokens,)`` of int32 or int64: ``block * block_size + offset``; negative
            for a token that is not kept.
        compress_lens: Refused.
        compress_seq_offsets: Refused.
        seq_lens: Refused.
        cache_mode: ``Norm``, the layout above.
    """
    if cache_mode != "Norm":
        refuse(_NAME, f"cache_mode={cache_mode!r}")
    for name, given in (
        ("compress_lens", compress_lens),
        ("compress_seq_offsets", compress_seq_offsets),
        ("seq_lens", seq_lens),
    ):
        if given is not None:
            refuse(_NAME, name)
    require(
        slot_mapping.dtype in (torch.int32, torch.int64) and slot_mapping.shape == key.shape[:1],
        _NAME,
        f"slot_mapping {slot_mapping.dtype} {tuple(slot_mapping.shape)} for {len(key)} tokens",
    )
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    for cache, tokens in ((key_cache, key), (value_cache, value)):
        require(
            cache.dim() == 4 and cache.shape[2:] == tokens.shape[1:],
            _NAME,
            f"tokens {tuple(tokens.shape)} for a cache {tuple(cache.shape)}",
        )
        require(cache.dtype == tokens.dtype, _NAME, f"{tokens.dtype} into {cache.dtype}")
        block_size = cache.shape[1]
        require(
            not slots.numel() or int(slots.max()) < cache.shape[0] * block_size,
            _NAME,
            f"slot {int(slots.max()) if slots.numel() else None} of {tuple(cache.shape)}",
        )
        cache[slots // block_size, slots % block_size] = tokens[kept]
