"""The Triton kernel that computes cache slots; Triton for Ascend is not to be had here."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any, NoReturn

import torch

from ..dispatch import CpuKernel
from ..refusal import refuse, require

_NAME = "_compute_slot_mapping_kernel"
_NOT_MODELLED = (
    "_compute_slot_mapping_fused_groups_kernel",
    "_compute_slot_mapping_fused_groups_adaptive_kernel",
)
_SLOT_MAPPING = 7
"""Position of the argument that the kernel writes."""


def replace(module: ModuleType) -> None:
    """Put stubs into the module that has the kernel; called once, after it was executed."""
    setattr(module, _NAME, SlotMappingKernel())
    for name in _NOT_MODELLED:
        if hasattr(module, name):
            setattr(module, name, RefusedKernel(name))


class SlotMappingKernel:
    """Is launched as the Triton kernel is: ``kernel[(requests + 1,)](...)``."""

    def __getitem__(self, grid: tuple[int]) -> CpuKernel:
        def run(*args: Any, **kwargs: Any) -> None:
            compute_slot_mapping(grid[0] - 1, *args, **kwargs)

        return CpuKernel(f"triton::{_NAME}", run, written=(_SLOT_MAPPING,))


class RefusedKernel:
    """A kernel that is not modelled: refuses when it is launched."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: object) -> NoReturn:
        refuse(self._name, f"grid {grid}")


def compute_slot_mapping(
    requests: int,
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    block_size: int,
    slot_mapping: torch.Tensor,
    *,
    TOTAL_CP_WORLD_SIZE: int,
    PAD_ID: int,
    IS_CIRCULAR: bool = False,
    **_layout: int,
) -> None:
    """Compute the slot of every token in the paged cache.

    Args:
        requests: How many rows of the block table are in use.
        num_tokens: Tokens of all requests; the rest of ``slot_mapping`` is padded.
        max_num_tokens: Where the padding ends.
        query_start_loc: ``(requests + 1 or more,)``: where the tokens of a request start.
        positions: ``(num_tokens or more,)``, each in its own request.
        block_table: ``(requests or more, blocks)``.
        block_table_stride: Blocks of a row.
        block_size: Tokens of a block.
        slot_mapping: ``(max_num_tokens or more,)``; written.
        TOTAL_CP_WORLD_SIZE: 1; context parallelism is refused.
        PAD_ID: The padding.
        IS_CIRCULAR: Refused.
        _layout: Tile sizes, and what matters to context parallelism only.
    """
    if TOTAL_CP_WORLD_SIZE != 1:
        refuse(_NAME, f"TOTAL_CP_WORLD_SIZE={TOTAL_CP_WORLD_SIZE}")
    if IS_CIRCULAR:
        refuse(_NAME, "IS_CIRCULAR=True")
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID
    starts = query_start_loc[: requests + 1].tolist()
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        own = positions[start:end].long()
        blocks = own // block_size
        require(
            not own.numel() or int(blocks.max()) < block_table_stride,
            _NAME,
            f"request {row} has a position beyond its {block_table_stride} blocks",
        )
        slots = block_table[row].long()[blocks] * block_size + own % block_size
        slot_mapping[start:end] = slots.to(slot_mapping.dtype)
