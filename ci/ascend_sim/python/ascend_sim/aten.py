"""Aten operators of the npu device, by torch's CPU kernels; and those of torch_npu's own.

Every aten operator that torch_npu implements is replaced, but for those that make, view, move or
free memory: these run in torch_npu itself, over the simulated runtime. Of torch_npu's own
operators (``torch.ops.npu``) a few are computed here, a few run as they are, and every other one
refuses when it is called: its real kernel would be dropped by torch_npu's queue thread together
with all later work, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

import torch

from .dispatch import CpuKernel, written_arguments
from .refusal import refuse
from .registration import Namespace
from .vendor import COMPUTED

NATIVE_ATEN = frozenset(
    {
        "_copy_from_and_resize",
        "_local_scalar_dense",
        "_pin_memory",
        "_reshape_alias",
        "_to_copy",
        "as_strided",
        "clone",
        "contiguous",
        "copy_",
        "empty.memory_format",
        "empty_like",
        "empty_strided",
        "empty_with_format",
        "is_pinned",
        "is_set_to",
        "new_empty_strided",
        "record_stream",
        "resize_",
        "set_",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
        "unfold",
        "view",
    }
)
"""Left to torch_npu: they make, view, move or free memory."""

NATIVE_NPU = frozenset(
    {
        "_npu_dtype_cast",
        "copy_memory_",
        "get_npu_format",
        "get_storage_size",
        "npu_change_data_ptr",
        "npu_dtype_cast",
        "npu_dtype_cast_",
        "npu_reshape",
        "npu_reshape.out",
        "one_",
        "set_op_timeout_ms",
    }
)
"""Left to torch_npu: the simulated runtime has what they call."""

INDEXING = frozenset({"index.Tensor", "index_put_", "_index_put_impl_"})
_INDICES = (1, "indices")
"""Indices may be on the CPU for a tensor of the device, on every backend of torch."""


def register(_: ModuleType) -> None:
    """Register everything for the npu device; called once, after torch_npu was imported."""
    for namespace, kernels in (("aten", _aten_kernels()), ("npu", _npu_kernels())):
        operators = Namespace(namespace, "IMPL")
        for name, kernel in kernels:
            operators.implement(name, kernel)


def _aten_kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in _registered("aten"):
        base, _, overload = name.partition(".")
        if name in NATIVE_ATEN or not hasattr(torch.ops.aten, base):
            continue
        operator = getattr(getattr(torch.ops.aten, base), overload or "default")
        yield (
            name,
            CpuKernel(
                f"aten::{name}",
                operator,
                written=written_arguments(operator._schema),
                host_arguments=_INDICES if name in INDEXING else (),
            ),
        )


def _npu_kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in _registered("npu"):
        if name in NATIVE_NPU:
            continue
        compute = COMPUTED.get(name)
        if compute is None:
            yield name, _refusal(f"npu::{name}")
        else:
            schema = getattr(torch.ops.npu, name).default._schema
            yield name, CpuKernel(f"npu::{name}", compute, written=written_arguments(schema))


def _registered(namespace: str) -> list[str]:
    """Return the names of the operators that torch_npu implements in a namespace."""
    found = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    prefix = f"{namespace}::"
    return [name.removeprefix(prefix) for name in found if name.startswith(prefix)]


def _refusal(operator: str) -> Callable[..., NoReturn]:
    def kernel(*_: Any, **__: Any) -> NoReturn:
        refuse(operator, "any arguments")

    return kernel
