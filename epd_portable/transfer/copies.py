"""Copies on the device's copy stream, ordered by events."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from epd_portable.errors import (
    CapacityError,
    LeaseExpiredError,
    PlatformError,
    TransportTimeoutError,
)

if TYPE_CHECKING:
    from epd_portable.platforms.base import DeviceEvent, Platform
    from epd_portable.transfer.pool import SharedMemory

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Monotonic seconds."""

CHUNK_BYTES = 8 << 20
"""In host memory the lease is looked at between chunks; one takes about a millisecond at most."""


@dataclass(eq=False, frozen=True, kw_only=True, slots=True)
class QueuedCopy:
    """A copy that a device makes asynchronously and that cannot be cancelled.

    The memory at both ends is in use until `finish` has returned or raised, regardless of the
    deadline.

    Attributes:
        ends: Both ends of the copy; they live as long as this.
        copied: Event behind the copy.
        deadline_s: End of the lease on ``clock``.
        ended: Called once, when the copy has ended, well or not.
    """

    ends: tuple[torch.Tensor, torch.Tensor]
    copied: DeviceEvent
    deadline_s: float
    clock: Clock
    ended: Callable[[], None]

    def finish(self) -> None:
        """Block until the copy has ended, without the GIL.

        Raises:
            TransportTimeoutError: It ended too late.
            PlatformError: The device failed.
        """
        try:
            self.copied.block()
        finally:
            self.ended()
        late_s = self.clock() - self.deadline_s
        if late_s >= 0:
            raise TransportTimeoutError(
                f"the device took {late_s:.3g} s longer than the lease to copy; "
                "raise transfer.lease_s"
            )


class DeviceCopies:
    """Device of a worker, as paths use it; for threads whose current device it is."""

    def __init__(self, platform: Platform, index: int = 0, clock: Clock = time.monotonic) -> None:
        self.platform = platform
        self.index = index
        self.device = platform.device(index)
        self.clock = clock

    def allocate(self, nbytes: int, *, what: str, remedy: str) -> torch.Tensor:
        """Return ``(nbytes,)`` uint8 on the device, allocated on the current stream.

        Raises:
            CapacityError: The device has no space for ``what``; with ``remedy``.
        """
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            free = self.platform.memory_info(self.index).free_bytes
            raise CapacityError(
                f"no space for {what} on {self.platform.name} device {self.index}, which has "
                f"{free} free: {remedy}"
            ) from error

    def check_lease(self, deadline_s: float) -> float:
        """Return the seconds that are left of a lease; `LeaseExpiredError` if it has ended."""
        remaining_s = deadline_s - self.clock()
        if remaining_s <= 0:
            raise LeaseExpiredError("the lease ended before the write; request a new grant")
        return remaining_s

    def write(
        self, target: torch.Tensor, src: torch.Tensor, *, after: DeviceEvent, deadline_s: float
    ) -> None:
        """Copy bytes and block until they are there; the compute stream is not held up.

        Args:
            target: ``(nbytes,)`` uint8, on this device, on one that it reaches, or on the host.
            src: Contiguous, of as many bytes, on this device or on the host.
            after: Event behind the work that fills ``src``.
            deadline_s: End of the lease on the clock.

        Raises:
            LeaseExpiredError: ``deadline_s`` has passed; nothing was copied.
            TransportTimeoutError: Not complete at ``deadline_s``.
            PlatformError: The device failed.
        """
        if self.platform.traits.needs_device_copy:
            self.queue(target, src, after=after, deadline_s=deadline_s).finish()
            return
        remaining_s = self.check_lease(deadline_s)
        source = src.view(-1).view(torch.uint8)
        for start in range(0, source.numel(), CHUNK_BYTES):
            if start:
                remaining_s = deadline_s - self.clock()
            if remaining_s <= 0:
                raise TransportTimeoutError(
                    f"{start} of {source.numel()} bytes written when the lease ended; "
                    "raise transfer.lease_s"
                )
            after.synchronize(remaining_s)
            _move(target, source, start, min(start + CHUNK_BYTES, source.numel()))

    def queue(
        self,
        target: torch.Tensor,
        src: torch.Tensor,
        *,
        after: DeviceEvent,
        deadline_s: float,
        ended: Callable[[], None] = lambda: None,
    ) -> QueuedCopy:
        """Let the device copy bytes, in one piece, once it has done the work before.

        Blocks only where one end is host memory and copies with that block (`pin`). Arguments and
        errors are those of `write`; ``ended`` is called once if this returns, see `QueuedCopy`.
        """
        self.check_lease(deadline_s)
        source = src.view(-1).view(torch.uint8)
        try:
            with self.platform.stream(self.index):
                after.wait()
                target.copy_(source, non_blocking=True)
                copied = self.platform.record_event()
        except Exception:
            # The device may have the copy, which ends before the error is raised.
            with self.platform.stream(self.index):
                self.platform.record_event().block()
            raise
        return QueuedCopy(
            ends=(target, source),
            copied=copied,
            deadline_s=deadline_s,
            clock=self.clock,
            ended=ended,
        )

    def to_host(self, src: torch.Tensor, *, after: DeviceEvent, deadline_s: float) -> torch.Tensor:
        """Return the bytes of ``src`` in page-locked host memory; a view if it is on the host.

        Raises as `write`.
        """
        if src.is_cpu:
            return src.view(-1).view(torch.uint8)
        nbytes = src.numel() * src.element_size()
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.write(host, src, after=after, deadline_s=deadline_s)
        return host

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Return a copy of what `to_host` made, or it itself where the engine reads it there.

        Does not block: it runs concurrently with the engine's work, and what the engine queues next
        waits.
        """
        if not self.platform.traits.needs_device_copy:
            return host
        with self.platform.stream(self.index):
            target = torch.empty(host.shape, dtype=host.dtype, device=self.device)
            target.copy_(host, non_blocking=True)
            copied = self.platform.record_event()
        copied.wait()
        self.platform.adopt(target)
        return target

    def pin(self, memory: SharedMemory) -> bool:
        """Page-lock a receive pool; return whether copies do not block the caller."""
        if not self.platform.traits.needs_device_copy:
            return False
        try:
            self.platform.pin_host(memory.tensor(0, memory.nbytes).data_ptr(), memory.nbytes)
        except PlatformError as error:
            logger.warning(
                "receive pool %s is not page-locked, copies block: %s", memory.path, error
            )
            return False
        return not self.platform.traits.foreign_pages_block

    def unpin(self, memory: SharedMemory) -> None:
        """Undo `pin`, also if that failed."""
        if self.platform.traits.needs_device_copy:
            with contextlib.suppress(PlatformError):
                self.platform.unpin_host(memory.tensor(0, memory.nbytes).data_ptr())


def _move(target: torch.Tensor, source: torch.Tensor, start: int, end: int) -> None:
    """Copy in host memory with the calling thread alone, and without the GIL.

    torch would start a team of threads for it, on cores that the encoder computes on.
    """
    ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, end - start)
