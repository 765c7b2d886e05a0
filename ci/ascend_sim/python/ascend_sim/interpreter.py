"""Triton kernels on simulated devices: by Triton's interpreter, in the memory of the device.

With ``TRITON_INTERPRET=1`` vLLM's and vllm-ascend's own kernels run as they are written, one
program of the grid after the other. vLLM's second model runner needs them. The compiler that they
are made for is Triton-Ascend's, which takes some that the public interpreter refuses; what differs
is bridged here:

- Pointers are addresses of the device, whose bytes lie elsewhere; kernels also load such pointers
  from tables in memory.
- Ranges and shapes need not be powers of two.
- Two scalars compare to a truth value, not to a number of their type.
- ``triton.language.extra.cann`` is not part of it: slices are, the rest refuses.

A kernel waits for its stream, and is complete when its launch returns; ``ASCEND_SIM_OP_US`` has no
effect on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
import torch_npu
import triton
import triton._utils
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from .memory import SHADOW_BYTES, device_addresses
from .oplog import count
from .refusal import refuse

_CANN = "triton.language.extra.cann"
_CORES = {"num_aicore": 20, "num_vectorcore": 40, "ub_size": 192 << 10}
"""Device that kernels choose their tiles for: a 910B3's cores, and bytes of its buffer."""


def install(module: ModuleType) -> None:
    """Let kernels be interpreted, and vLLM know that it has Triton; called once.

    Args:
        module: ``vllm.triton_utils.importing``, which looks for drivers and has found none.
    """
    module.HAS_TRITON = True  # type: ignore[attr-defined]
    interpreter._interpreter = _Memory(interpreter._interpreter)
    for name in dir(interpreter.InterpreterBuilder):
        if name.startswith(("create_icmp", "create_fcmp")):
            compare = getattr(interpreter.InterpreterBuilder, name)
            setattr(interpreter.InterpreterBuilder, name, _comparing(compare))
    interpreter.GridExecutor._init_args_hst = _arguments
    interpreter.GridExecutor._restore_args_dev = lambda *unused: None
    triton._utils.is_power_of_two = lambda size: True
    TritonSemantic.arange = _arange
    # The interpreter has no driver, and is queried for the device's properties.
    active = SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda index: _CORES),
        get_current_device=torch_npu.npu.current_device,
        get_current_target=lambda: SimpleNamespace(backend="npu", arch="Ascend910B3", warp_size=0),
    )
    triton.runtime.driver = SimpleNamespace(active=active)
    _provide_cann()


class _Memory:
    """The interpreter's access to memory, by addresses of the device as well as of the host."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, pointers: np.ndarray, *rest: Any) -> Any:
        return self._inner.load(_bytes_at(pointers), *rest)

    def store(self, pointers: np.ndarray, *rest: Any) -> Any:
        return self._inner.store(_bytes_at(pointers), *rest)

    def atomic_cas(self, pointers: np.ndarray, *rest: Any) -> Any:
        return self._inner.atomic_cas(_bytes_at(pointers), *rest)

    def atomic_rmw(self, operation: Any, pointers: np.ndarray, *rest: Any) -> Any:
        return self._inner.atomic_rmw(operation, _bytes_at(pointers), *rest)


def _bytes_at(pointers: np.ndarray) -> np.ndarray:
    """Return where the bytes of these addresses are in this process."""
    addresses = np.asarray(pointers).astype(np.uint64)
    first, end = device_addresses()
    of_device = (addresses >= first) & (addresses < end)
    moved = np.where(of_device, addresses + np.uint64(SHADOW_BYTES), addresses)
    return moved.astype(np.asarray(pointers).dtype)


def _comparing(compare: Callable[..., Any]) -> Callable[..., Any]:
    def run(builder: Any, left: Any, right: Any) -> Any:
        found = compare(builder, left, right)
        return interpreter.TensorHandle(np.asarray(found.data).astype(bool), core.int1)

    return run


def _arguments(
    executor: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return a kernel's arguments as they are: what they point to is where the device has it."""
    count(f"triton::{executor.fn.__name__}")
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.device.type == "npu":
            torch_npu.npu.current_stream(value.device).synchronize()
            break
    return args, kwargs


def _arange(semantic: Any, start: int, end: int, *, ret_ty: Any = None) -> Any:
    kind = ret_ty or core.block_type(core.int32, [end - start])
    made = semantic.builder.create_make_range(kind.to_ir(semantic.builder), start, end)
    return semantic.make_tensor(made, kind)


def _provide_cann() -> None:
    extension = ModuleType(f"{_CANN}.extension")
    extension.extract_slice = _extract_slice  # type: ignore[attr-defined]
    extension.insert_slice = _insert_slice  # type: ignore[attr-defined]
    extension.get_element = _get_element  # type: ignore[attr-defined]
    cann = ModuleType(_CANN)
    cann.extension = extension  # type: ignore[attr-defined]
    sys.modules[_CANN] = cann
    sys.modules[extension.__name__] = extension


def _extract_slice(
    full: Any, offsets: Sequence[Any], sizes: Sequence[Any], strides: Sequence[Any], **_hints: Any
) -> Any:
    data = full.handle.data[_cut(offsets, sizes, strides)]
    handle = interpreter.TensorHandle(data, full.dtype)
    return core.tensor(handle, core.block_type(full.dtype, list(data.shape)))


def _insert_slice(
    full: Any,
    part: Any,
    offsets: Sequence[Any],
    sizes: Sequence[Any],
    strides: Sequence[Any],
    **_hints: Any,
) -> Any:
    data = full.handle.data.copy()
    data[_cut(offsets, sizes, strides)] = part.handle.data
    return core.tensor(interpreter.TensorHandle(data, full.dtype), full.type)


def _get_element(*_args: Any, **_kwargs: Any) -> NoReturn:
    refuse("triton get_element", "it is not modelled")


def _cut(offsets: Sequence[Any], sizes: Sequence[Any], strides: Sequence[Any]) -> tuple[slice, ...]:
    begins, lengths, steps = (
        [int(getattr(value, "value", value)) for value in each]
        for each in (offsets, sizes, strides)
    )
    return tuple(
        slice(begin, begin + length * step, step)
        for begin, length, step in zip(begins, lengths, steps, strict=True)
    )
