"""A platform whose events order nothing: what a wait that was left out does."""

from __future__ import annotations

from epd_portable.platforms.base import DeviceEvent
from epd_portable.platforms.npu import NpuPlatform


class Passed(DeviceEvent):
    """An event for which nothing waits."""

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def block(self) -> None:
        pass


class Forgetful(NpuPlatform):
    """The platform without the order of its events."""

    def record_event(self) -> DeviceEvent:
        return Passed()
