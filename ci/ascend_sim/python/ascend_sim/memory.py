"""Device memory of the simulated runtime as the CPU sees it, and delays on its streams."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
import torch_npu

SHADOW_BYTES = 1 << 40
"""The runtime maps the bytes of device address ``a`` at host address ``a + SHADOW_BYTES``.

A device address itself faults when the host dereferences it.
"""


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the same bytes as a device tensor, of the same shape and strides.

    It does not own the bytes, and nothing waits: the caller has synchronised the stream, and keeps
    ``tensor`` alive. Without bytes (an empty storage) the result is a fresh empty tensor.
    """
    storage = tensor.untyped_storage()
    if not storage.nbytes() or not storage.data_ptr():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    shadow = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr() + SHADOW_BYTES, torch.device("cpu"), storage.nbytes()
    )
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(shadow, tensor.storage_offset(), tensor.size(), tensor.stride())


@functools.cache
def device_addresses() -> tuple[int, int]:
    """Return the first address of the range that all device addresses are in, and its end.

    The runtime keeps them without any access, so that the process shows them as one mapping; where
    its neighbours are without access too they count, which no tensor has its bytes in.
    """
    probe = torch.empty(1, device="npu").data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(side, 16) for side in line.split()[0].split("-"))
        if first <= probe < end:
            return first, end
    raise RuntimeError(f"device address {probe:#x} is in no mapping of this process")


def delay(stream: torch_npu.npu.Stream, microseconds: int) -> None:
    """Let the stream do nothing for a time, after what is queued on it; returns at once."""
    _runtime().ascend_sim_delay(ctypes.c_void_p(stream.npu_stream), ctypes.c_uint64(microseconds))


@functools.cache
def _runtime() -> ctypes.CDLL:
    """Return the runtime that torch_npu has loaded.

    The dynamic loader knows it by this name already; the path serves when it does not.
    """
    folder = Path(torch_npu.__file__).parent.parent / "torch_npu.libs"
    try:
        return ctypes.CDLL("libascendcl.so")
    except OSError:
        return ctypes.CDLL(str(folder / "libascendcl.so"))
