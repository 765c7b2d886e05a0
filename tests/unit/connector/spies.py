"""A device that tests look into: its pinned memory, and events that they hold back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from epd_portable.errors import PlatformError
from epd_portable.platforms.base import DeviceEvent
from epd_portable.platforms.cpu import CpuPlatform, PassedEvent

NEVER_S = 1e9


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
