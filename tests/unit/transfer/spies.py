"""A device that tests look into: its pinned memory, and events that they hold back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from epd_portable.errors import PlatformError, UnsupportedError
from epd_portable.platforms.base import DeviceEvent, ShareHandle
from epd_portable.platforms.cpu import CpuPlatform, PassedEvent

NEVER_S = 1e9
SLAB_ALIGNMENT = 4096


class SpyPlatform(CpuPlatform):
    """The CPU with a page-locking that is asked for, and events that tests can hold back."""

    traits = replace(CpuPlatform.traits, needs_device_copy=True)

    def __init__(self) -> None:
        self.event: DeviceEvent = PassedEvent()
        self.pinned: list[tuple[int, int]] = []
        self.unpinned: list[int] = []
        self.refuses = False
        self.refusals = 0

    def record_event(self) -> DeviceEvent:
        self.refusals -= 1
        if self.refusals >= 0:
            raise PlatformError("cannot record an event")
        return self.event

    def pin_host(self, address: int, nbytes: int) -> None:
        if self.refuses:
            raise PlatformError("no more page-locked memory")
        self.pinned.append((address, nbytes))

    def unpin_host(self, address: int) -> None:
        if self.refuses:
            raise PlatformError("nothing is pinned there")
        self.unpinned.append(address)


class SpyEvent(DeviceEvent):
    """Passes when a test says so; counts who waits for it."""

    def __init__(self, passed: Callable[[], bool] = lambda: True) -> None:
        self.waits = 0
        self._passed = passed

    def wait(self) -> None:
        self.waits += 1

    def done(self) -> bool:
        return self._passed()

    def block(self) -> None:
        while not self._passed():
            pass


class SharingPlatform(CpuPlatform):
    """The CPU, whose tensors are opened in the same process by their place in a list."""

    traits = replace(CpuPlatform.traits, slab_alignment_bytes=SLAB_ALIGNMENT)

    def __init__(self) -> None:
        self.shared: list[torch.Tensor] = []
        self.problem: Exception | None = None
        self.refuses_to_share = False
        self.opened = 0

    def share_tensor(self, tensor: torch.Tensor) -> ShareHandle:
        if self.refuses_to_share:
            raise UnsupportedError("memory in expandable segments cannot be shared")
        self.shared.append(tensor)
        return ShareHandle(
            device_type="cpu",
            device_uuid="",
            nbytes=tensor.numel(),
            offset=0,
            storage=(str(len(self.shared) - 1).encode(), 0, 0, b"", 0, b"", False),
        )

    def open_tensor(self, handle: ShareHandle) -> torch.Tensor:
        if self.problem is not None:
            raise self.problem
        self.opened += 1
        return self.shared[int(handle.storage[0])]
