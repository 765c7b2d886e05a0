"""Runs one operator of the device by a function of CPU tensors, without copying its arguments.

Two modes. Ordinarily the operator is complete when the call returns, in the device's memory. With
``ASCEND_SIM_OP_US=n`` it is asynchronous, as on a device: what it writes and returns reaches the
device's memory ``n`` microseconds later, in the order of the current stream, so that a stream
which does not wait for it reads old data. Its inputs are read at the call in both modes, after
everything that the current stream held before, and nothing that another stream holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch_npu

from .memory import delay, host_view
from .oplog import count
from .random_state import cpu_twin

OP_US = int(os.environ.get("ASCEND_SIM_OP_US", "0"))


class CpuKernel:
    """A callable with the operator's own arguments and results.

    Raises (when called):
        RuntimeError: The arguments are on more than one device; one with dimensions on the CPU
            counts, unless it is in one of the ``host_arguments``.
        Exception: Any exception of ``compute``.
    """

    def __init__(
        self,
        operator: str,
        compute: Callable[..., Any],
        *,
        written: Collection[int | str] = (),
        host_arguments: Collection[int | str] = (),
    ) -> None:
        """Describe the operator.

        Args:
            operator: Its name, for messages and counts.
            compute: Computes it from CPU tensors, writing what the operator writes.
            written: Positions and names of the arguments that it writes.
            host_arguments: The same of arguments that may hold tensors of the CPU.
        """
        self.operator = operator
        self._compute = compute
        self._written = written
        self._host_arguments = host_arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator."""
        count(self.operator)
        written = self._written_tensors(args, kwargs) if OP_US else []
        call = _Call(self.operator, written)
        free = self._host_arguments
        host_args = [call.to_host(value, place in free) for place, value in enumerate(args)]
        host_kwargs = {name: call.to_host(value, name in free) for name, value in kwargs.items()}
        result = self._compute(*host_args, **host_kwargs)
        call.begin_results()
        return call.to_device(result)

    def _written_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for place, value in (*enumerate(args), *kwargs.items()):
            if place in self._written:
                found.extend(_tensors(value))
        return found


def written_arguments(schema: torch.FunctionSchema) -> set[int | str]:
    """Return positions and names of the arguments that an operator of this schema writes."""
    places: set[int | str] = set()
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            places |= {index, argument.name}
    return places


class _Call:
    """A call: its device, and the CPU tensor of each device tensor."""

    def __init__(self, operator: str, written: list[torch.Tensor]) -> None:
        self._operator = operator
        self._written = written
        self._device: torch.device | None = None
        self._host_device: torch.device | None = None
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_host(self, value: Any, may_be_on_host: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor_to_host(value, may_be_on_host)
        if isinstance(value, (list, tuple)):
            return type(value)(self.to_host(item, may_be_on_host) for item in value)
        if isinstance(value, torch.Generator) and value.device.type == "npu":
            return cpu_twin(value)
        if isinstance(value, torch.device) and value.type == "npu":
            if self._device is None:
                self._device = _indexed(value)
            return torch.device("cpu")
        return value

    def _tensor_to_host(self, tensor: torch.Tensor, may_be_on_host: bool) -> torch.Tensor:
        if tensor.device.type != "npu":
            # A tensor without dimensions counts as a number, on every backend of torch.
            if tensor.dim() and not may_be_on_host:
                self._host_device = tensor.device
                self._check_one_device(self._device)
            return tensor
        self._check_one_device(tensor.device)
        if self._device is None:
            torch_npu.npu.current_stream(tensor.device).synchronize()
        self._device = tensor.device
        view = host_view(tensor)
        if any(tensor is other for other in self._written):
            view = view.clone()
        self._pairs.append((tensor, view))
        return view

    def _check_one_device(self, device: torch.device | None) -> None:
        others = {self._device, self._host_device, device} - {None}
        if len(others) > 1:
            names = " and ".join(sorted(str(other) for other in others))
            raise RuntimeError(
                f"ascend_sim: {self._operator} on tensors of {names}; move them to one device"
            )

    def begin_results(self) -> None:
        """Make the results late if they are to be, and put them into the tensors written."""
        device = self._device or _indexed(torch.device("npu"))
        self._device = device
        self._stream = torch_npu.npu.current_stream(device)
        if OP_US:
            # Nothing of the host's task queue is left, so the delay precedes the copies below.
            self._stream.synchronize()
            delay(self._stream, OP_US)
        for tensor, view in self._pairs:
            if view.shape != tensor.shape:
                # An out= argument of another size: the CPU kernel has resized its own.
                tensor.resize_(view.shape)
                tensor.copy_(view)
            elif tensor.numel() and any(tensor is other for other in self._written):
                tensor.copy_(view.pin_memory(), non_blocking=True)

    def to_device(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self.to_device(item) for item in value)
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        for tensor, view in self._pairs:
            if value is view:
                return tensor
            if value.numel() and _same_storage(value, view):
                return tensor.as_strided(value.size(), value.stride(), value.storage_offset())
        return self._fresh(value)

    def _fresh(self, value: torch.Tensor) -> torch.Tensor:
        fresh = torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=self._device
        )
        if not value.numel():
            return fresh
        if OP_US:
            fresh.copy_(value.pin_memory(), non_blocking=True)
        else:
            # The allocator may have given a block that earlier work on the stream still uses.
            self._stream.synchronize()
            host_view(fresh).copy_(value)
        return fresh


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _indexed(device: torch.device) -> torch.device:
    if device.index is not None:
        return device
    return torch.device("npu", torch_npu.npu.current_device())
