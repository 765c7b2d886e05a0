"""The CPU: one device, synchronous, whose memory is host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import psutil
import torch

from epd_portable.errors import PlatformUnavailableError, UnsupportedError
from epd_portable.platforms.base import (
    Availability,
    DeviceEvent,
    MemoryInfo,
    Platform,
    ShareHandle,
    StreamUse,
)
from epd_portable.platforms.collectives import CollectiveGroup, Rendezvous
from epd_portable.platforms.traits import TRAITS

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class PassedEvent(DeviceEvent):
    """An event of a device that completes every operation before it returns."""

    def wait(self) -> None:
        """Do nothing: there is no work left to wait for."""

    def done(self) -> bool:
        return True

    def block(self) -> None:
        """Return at once."""


class CpuPlatform(Platform):
    """The platform that every machine has.

    Ordering is free: an operation is complete when its call returns, so events have passed when
    they are recorded. Pinning is a no-op for the same reason: no copy engine reads the memory.
    """

    traits = TRAITS["cpu"]

    def availability(self) -> Availability:
        """Return that the platform is available wherever torch is."""
        return Availability(ok=True, reason=f"torch {torch.__version__}")

    def device_count(self) -> int:
        """Return 1: cores are bound to processes, not to devices."""
        return 1

    def device(self, index: int) -> torch.device:
        if index != 0:
            raise PlatformUnavailableError(f"cpu device {index}: the CPU is one device, index 0")
        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        self.device(index)

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Return whether vLLM's CPU kernels take it."""
        return dtype in _DTYPES

    def memory_info(self, index: int) -> MemoryInfo:
        """Return the host's memory; what the kernel can reclaim counts as free."""
        self.device(index)
        memory = psutil.virtual_memory()
        return MemoryInfo(free_bytes=memory.available, total_bytes=memory.total)

    def stream(self, index: int, use: StreamUse = "copy") -> AbstractContextManager[object]:
        """Return an empty context: there is one stream, the calling thread."""
        self.device(index)
        return nullcontext()

    def record_event(self) -> DeviceEvent:
        return PassedEvent()

    def adopt(self, tensor: torch.Tensor) -> None:
        """Do nothing: memory is not in use after the call that used it."""

    def pin_host(self, address: int, nbytes: int) -> None:
        """Do nothing: no copy engine reads the memory."""

    def unpin_host(self, address: int) -> None:
        """Do nothing."""

    def share_tensor(self, tensor: torch.Tensor) -> ShareHandle:
        """Refuse: a CPU tensor is shared by placing it in shared memory, not by a handle."""
        raise UnsupportedError("cpu: there is no device memory to share; use the shm transfer path")

    def open_tensor(self, handle: ShareHandle) -> torch.Tensor:
        raise UnsupportedError(
            f"cpu: cannot open {handle.device_type} memory; use the shm transfer path"
        )

    def new_group(self, rendezvous: Rendezvous, *, index: int, timeout_s: float) -> CollectiveGroup:
        return CollectiveGroup(rendezvous, device=self.device(index), timeout_s=timeout_s)
