"""Operators of ATB, whose library (``libatb.so``) the runtime does not simulate."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch

from ..refusal import refuse


def replace(module: ModuleType) -> None:
    """Let torch_npu's ATB module register stubs; called once, after it was executed."""

    def register_atb_extensions() -> None:
        import torch_npu

        for name in module.API_LIST:
            setattr(torch_npu, name, _COMPUTED.get(name) or _refusal(name))

    module._register_atb_extensions = register_atb_extensions  # type: ignore[attr-defined]


def matmul_add_fp32(x: torch.Tensor, weight: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Add ``x.T @ weight`` to ``total``, in float32; the worker's warm-up is its only caller."""
    return total.add_((x.t() @ weight).float())


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Write the keys and values of tokens into their slots, as `scatter_pa_kv_cache` does."""
    torch.ops.npu.npu_scatter_pa_kv_cache(
        key, value, key_cache, value_cache, slot_indices, cache_mode="Norm"
    )


def _refusal(name: str) -> Callable[..., NoReturn]:
    def call(*_: Any, **__: Any) -> NoReturn:
        refuse(f"torch_npu.{name}", "any arguments (ATB)")

    return call


_COMPUTED: dict[str, Callable[..., torch.Tensor | None]] = {
    "_npu_matmul_add_fp32": matmul_add_fp32,
    "_npu_reshape_and_cache": reshape_and_cache,
}
