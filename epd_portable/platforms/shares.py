"""What a platform can that lets a process keep itself to a part of a device's compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class LimitsCompute(Protocol):
    """Beside `Platform`: elsewhere the driver does it, or nobody."""

    def compute_units(self, index: int) -> Mapping[str, int]:
        """Return how many units of each kind this process computes with on a device.

        Raises:
            PlatformUnavailableError: There is no such device.
            UnsupportedError: The installed runtime is too old.
        """
        ...

    def limit_compute(self, index: int, percent: int) -> Mapping[str, int]:
        """Keep this process to a part of a device, from the work that is queued next on.

        Graphs that were captured before keep what they had. May be called once in a process.

        Args:
            index: Of the device.
            percent: Of each kind of unit, 1 to 100; at least one unit is left.

        Returns:
            What is left, as `compute_units` does.

        Raises:
            PlatformUnavailableError: There is no such device.
            UnsupportedError: The installed runtime is too old.
        """
        ...
