"""The CPU, taken for a device that has done what was queued only when a test lets it.

What an operation writes is there when it returns; only events tell otherwise.
"""

from __future__ import annotations

import dataclasses
import threading
import time

from epd_portable.errors import PlatformError
from epd_portable.platforms.base import DeviceEvent
from epd_portable.platforms.cpu import CpuPlatform
from epd_portable.platforms.traits import TRAITS

DEADLINE_S = 30.0


class HeldEvent(DeviceEvent):
    """Passes when the platform lets it."""

    def __init__(self, platform: HeldPlatform, place: int) -> None:
        self._platform, self._place = platform, place

    def wait(self) -> None:
        """Order nothing: the bytes are there."""

    def done(self) -> bool:
        if self._platform.broken:
            raise PlatformError("it is broken")
        return self._platform.passed >= self._place

    def block(self) -> None:
        with self._platform.changed:
            assert self._platform.changed.wait_for(self.done, DEADLINE_S), "it was never let go"


class HeldPlatform(CpuPlatform):
    """Events pass in the order in which they were recorded.

    Attributes:
        recorded: So many events were.
        passed: So many of them have.
        broken: The device has failed.
    """

    traits = dataclasses.replace(TRAITS["cpu"], needs_device_copy=True)

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()
        self.recorded = self.passed = 0
        self.broken = False

    def record_event(self) -> DeviceEvent:
        with self.changed:
            self.recorded += 1
            return HeldEvent(self, self.recorded)

    def let(self, events: int | None = None) -> float:
        """Let so many more events pass, or all that were recorded; return when."""
        with self.changed:
            self.passed = self.recorded if events is None else self.passed + events
            self.changed.notify_all()
            return time.monotonic()

    def fail(self) -> None:
        """Break the device."""
        with self.changed:
            self.broken = True
            self.changed.notify_all()
