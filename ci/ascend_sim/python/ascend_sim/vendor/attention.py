"""Fused attention over packed sequences, with and without a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..refusal import refuse, require

_NAME = "npu_fused_infer_attention_score"
_EVERYTHING = 2147483647
"""``pre_tokens`` and ``next_tokens`` that leave nothing out."""
_MASK_SIZE = 2048
_MASK_DTYPES = (torch.int8, torch.uint8, torch.bool)
_QUERIES_AT_ONCE = 1024
"""Bounds the score matrix: an encoder's profile run has one very long sequence."""
_NO_MASK, _CAUSAL, _BAND = 0, 3, 4


def fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = _EVERYTHING,
    next_tokens: int = _EVERYTHING,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend sequence by sequence.

    Args:
        query: ``(tokens, num_heads, head_size)``, all sequences one after another.
        key: As ``query`` with ``num_key_value_heads``; with a ``block_table`` the cache,
            ``(blocks, block_size, num_key_value_heads * head_size)``.
        value: As ``key``.
        atten_mask: With sparse modes 3 and 4 the 2048 × 2048 upper triangle, else refused.
        actual_seq_lengths: Where each sequence of the query ends.
        actual_seq_lengths_kv: The same of the keys; with a ``block_table`` their lengths.
        block_table: ``(sequences or more, blocks of a sequence)``.
        num_heads: Heads of the query.
        scale: Factor of the scores.
        pre_tokens: In sparse mode 4, how many keys before its own a query sees.
        next_tokens: The same of keys after its own.
        input_layout: ``TND``.
        num_key_value_heads: Heads of keys and values; 0 means ``num_heads``.
        sparse_mode: 0 everything; 3 causal; 4 a band. The last query sees the last key.
        block_size: Tokens of a block of the cache.
        others: Arguments of the schema that are not modelled: refused unless off.

    Returns:
        The output, as ``query``; and one float32 without meaning, for the log-sum-exp that was
        not requested.
    """
    _refuse_others(input_layout, sparse_mode, atten_mask, others)
    if actual_seq_lengths is None or actual_seq_lengths_kv is None:
        refuse(_NAME, "actual_seq_lengths or actual_seq_lengths_kv of None")
    kv_heads = num_key_value_heads or num_heads
    _check_tensors(query, key, value, num_heads)
    before, after = _window(sparse_mode, atten_mask, pre_tokens, next_tokens)
    query_ends, kv_ends = list(actual_seq_lengths), list(actual_seq_lengths_kv)
    require(
        len(query_ends) == len(kv_ends) and query_ends[-1] == len(query),
        _NAME,
        f"actual_seq_lengths {query_ends}, of kv {kv_ends}, for {len(query)} tokens",
    )
    if block_table is None:
        require(kv_ends[-1] <= len(key), _NAME, f"keys end at {kv_ends[-1]} of {len(key)}")
    else:
        _check_paged(key, block_table, block_size, kv_heads * query.shape[-1], len(kv_ends))

    output = torch.empty_like(query)
    query_start = kv_start = 0
    for row, (query_end, kv_end) in enumerate(zip(query_ends, kv_ends, strict=True)):
        if block_table is None:
            keys, values = key[kv_start:kv_end], value[kv_start:kv_end]
            kv_start = kv_end
        else:
            blocks = block_table[row, : -(-kv_end // block_size)].long()
            keys = _gather(key, blocks, kv_end, kv_heads)
            values = _gather(value, blocks, kv_end, kv_heads)
        if query_end > query_start:
            output[query_start:query_end] = _attend(
                query[query_start:query_end], keys, values, scale, before, after
            )
        query_start = query_end
    return output, torch.zeros(1)


def _refuse_others(
    input_layout: str, sparse_mode: int, atten_mask: torch.Tensor | None, others: dict[str, Any]
) -> None:
    if input_layout != "TND":
        refuse(_NAME, f"input_layout={input_layout!r}")
    if sparse_mode not in (_NO_MASK, _CAUSAL, _BAND):
        refuse(_NAME, f"sparse_mode={sparse_mode}")
    if sparse_mode == _NO_MASK and atten_mask is not None:
        refuse(_NAME, "atten_mask in sparse_mode=0")
    for name, given in others.items():
        if isinstance(given, torch.Tensor) or given:
            refuse(_NAME, f"{name}={'a tensor' if isinstance(given, torch.Tensor) else given}")


def _check_tensors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_heads: int
) -> None:
    require(
        query.dim() == 3 and query.shape[1] == num_heads,
        _NAME,
        f"query {tuple(query.shape)} for {num_heads} heads",
    )
    require(
        query.dtype == key.dtype == value.dtype and key.shape == value.shape,
        _NAME,
        f"query {query.dtype}, key {key.dtype} {tuple(key.shape)}, "
        f"value {value.dtype} {tuple(value.shape)}",
    )


def _check_paged(
    cache: torch.Tensor, block_table: torch.Tensor, block_size: int, width: int, sequences: int
) -> None:
    if cache.dim() != 3:
        refuse(_NAME, f"a paged cache of {cache.dim()} dimensions")
    require(
        cache.shape[1:] == (block_size, width),
        _NAME,
        f"cache {tuple(cache.shape)} for blocks of {block_size} × {width}",
    )
    require(
        block_table.dim() == 2 and len(block_table) >= sequences,
        _NAME,
        f"block table {tuple(block_table.shape)} for {sequences} sequences",
    )


def _window(
    sparse_mode: int, atten_mask: torch.Tensor | None, pre_tokens: int, next_tokens: int
) -> tuple[int, int] | tuple[None, None]:
    """Return how many keys before and after its own a query sees; ``None`` for all."""
    if sparse_mode == _NO_MASK:
        return None, None
    require(
        atten_mask is not None
        and atten_mask.shape[-2:] == (_MASK_SIZE, _MASK_SIZE)
        and atten_mask.dtype in _MASK_DTYPES,
        _NAME,
        f"sparse_mode={sparse_mode} needs a {_MASK_SIZE} × {_MASK_SIZE} mask of "
        f"{', '.join(str(dtype) for dtype in _MASK_DTYPES)}",
    )
    assert atten_mask is not None
    corners = atten_mask.reshape(_MASK_SIZE, _MASK_SIZE)[[0, 0, -1, -1], [0, -1, 0, -1]]
    require(
        corners.tolist() == [0, 1, 0, 0],
        _NAME,
        f"sparse_mode={sparse_mode} needs the upper triangle as its mask",
    )
    if sparse_mode == _CAUSAL:
        return _EVERYTHING, 0
    if pre_tokens < 0 or next_tokens < 0:
        refuse(_NAME, f"pre_tokens={pre_tokens}, next_tokens={next_tokens}")
    return pre_tokens, next_tokens


def _gather(cache: torch.Tensor, blocks: torch.Tensor, tokens: int, kv_heads: int) -> torch.Tensor:
    """Return ``(tokens, kv_heads, head_size)`` of one sequence from the cache."""
    return cache[blocks].reshape(-1, kv_heads, cache.shape[-1] // kv_heads)[:tokens]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    before: int | None,
    after: int | None,
) -> torch.Tensor:
    """Attend in one sequence: the last query sits at the last key."""
    offset = len(key) - len(query)
    if before is not None:
        require(offset >= 0, _NAME, f"{len(query)} queries for {len(key)} keys under a mask")
    group = query.shape[1] // key.shape[1]
    keys, values = (
        part.float().repeat_interleave(group, 1).transpose(0, 1) for part in (key, value)
    )
    output = torch.empty_like(query)
    for start in range(0, len(query), _QUERIES_AT_ONCE):
        part = query[start : start + _QUERIES_AT_ONCE]
        visible = None
        if before is not None and after is not None:
            own = torch.arange(start, start + len(part))[:, None] + offset
            others = torch.arange(len(key))[None]
            visible = (others >= own - before) & (others <= own + after)
        attended = torch.nn.functional.scaled_dot_product_attention(
            part.float().transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=visible,
            scale=scale,
        )
        output[start : start + len(part)] = attended[0].transpose(0, 1).to(query.dtype)
    return output
