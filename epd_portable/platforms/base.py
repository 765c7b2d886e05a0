"""The contract of a platform, and the plain data that it hands out."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec

from epd_portable.errors import TransportTimeoutError
from epd_portable.platforms.traits import PlatformTraits

if TYPE_CHECKING:
    import torch

    from epd_portable.platforms.collectives import CollectiveGroup, Rendezvous

StreamUse = Literal["copy", "encode", "current"]

_FIRST_POLL_S, _LONGEST_POLL_S = 20e-6, 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Availability:
    """Usability of a platform in this process.

    Attributes:
        ok: Its runtime loads and sees at least one device.
        reason: What was found, or what is missing and how to get it; never empty.
    """

    ok: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryInfo:
    """Memory of one device; free is what no process uses."""

    free_bytes: int
    total_bytes: int

    def left_of(self, part: float, before: MemoryInfo) -> int:
        """Return what is left, in bytes, of a part that is one process's.

        Args:
            part: Of the whole memory.
            before: When the process had taken nothing; what others took since counts as its own.
        """
        taken = before.free_bytes - self.free_bytes
        return max(0, min(int(part * self.total_bytes) - taken, self.free_bytes))


class ShareHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Names device memory of one process so that another on the same host can open it.

    Plain data: it holds no reference, so the exporter must keep the memory until every opener has
    release it.

    Attributes:
        device_uuid: The physical device; empty when the runtime does not name it.
        offset: First byte in the storage.
        storage: What torch needs to open the storage: handle of its allocation, size, and start in
            it; name of the counter of openers in shared memory, and which of the counters under
            that name; handle of the event behind which the content is complete, and whether an
            opener must wait for it.
    """

    device_type: str
    device_uuid: str
    nbytes: int
    offset: int
    storage: tuple[bytes, int, int, bytes, int, bytes, bool]


class DeviceEvent(ABC):
    """A point in a device's work; it has passed when all work queued before it is complete."""

    @abstractmethod
    def wait(self) -> None:
        """Make work queued on the current stream from here on wait; does not block."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the event has passed; does not block.

        Raises:
            PlatformError: The work before it failed.
        """

    @abstractmethod
    def block(self) -> None:
        """Block the calling thread until the event has passed, however long that takes.

        Does not poll, and Python's other threads run meanwhile. Raises as `done`.
        """

    def synchronize(self, timeout_s: float) -> None:
        """Block the calling thread until the event has passed, but no longer than this.

        Polls, because no runtime waits with a deadline; each question takes Python's lock.

        Raises:
            TransportTimeoutError: Not passed within ``timeout_s``; the work may still complete.
            PlatformError: The work before it failed.
        """
        begin_s = time.monotonic()
        while not self.done():
            waited_s = time.monotonic() - begin_s
            if waited_s >= timeout_s:
                raise TransportTimeoutError(
                    f"device work was not complete after {timeout_s:g} s; "
                    "the device is stuck, or the deadline is too short for its load"
                )
            # At most a quarter too late.
            pause_s = min(max(_FIRST_POLL_S, waited_s / 4), _LONGEST_POLL_S)
            time.sleep(min(pause_s, timeout_s - waited_s))


class Platform(ABC):
    """A kind of device, its memory and its collectives.

    Callers query a capability, never a vendor. Device indexes count the devices that this
    process may see, from 0. Every method but `availability` may raise `PlatformUnavailableError`
    when the platform or a device of that index is not there, and `PlatformError` when the runtime
    fails; only further errors are listed.

    Attributes:
        traits: The facts that need no device.
    """

    traits: PlatformTraits

    @property
    def name(self) -> str:
        """Name in configurations."""
        return self.traits.name

    @property
    def device_type(self) -> str:
        """Word that torch has for the devices."""
        return self.traits.device_type

    @abstractmethod
    def availability(self) -> Availability:
        """Return whether the platform can be used here, with the reason.

        Creates no device context, so a parent that forks later may call it. Raises nothing.
        """

    @abstractmethod
    def device_count(self) -> int:
        """Return how many devices this process may see."""

    @abstractmethod
    def device(self, index: int) -> torch.device:
        """Return the device, its index always spelt out where the platform has several."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Make a device the calling thread's current one."""

    @abstractmethod
    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Return whether encoder outputs of this dtype can be stored and computed with."""

    @abstractmethod
    def memory_info(self, index: int) -> MemoryInfo:
        """Return how much memory a device has, and how much of it is free."""

    @abstractmethod
    def stream(self, index: int, use: StreamUse = "copy") -> AbstractContextManager[object]:
        """Queue the work of a ``with`` block on another stream than the engine's.

        There is one a device and use, or the stream that is current in this call, for any thread.
        Neither entering nor leaving the block orders it with other streams: that is what events are
        for.
        """

    @abstractmethod
    def record_event(self) -> DeviceEvent:
        """Return an event behind the work queued so far on the current device's current stream."""

    @abstractmethod
    def adopt(self, tensor: torch.Tensor) -> None:
        """Hand memory that was allocated on another stream to the current stream.

        The memory is not reused before work queued on the current stream up to the end of
        the tensor's life is complete. Orders nothing: the current stream must wait for the event
        behind the work that fills the tensor on its own.
        """

    @abstractmethod
    def pin_host(self, address: int, nbytes: int) -> None:
        """Page-lock host memory that torch did not allocate, so that copies do not block.

        Args:
            address: Start; a multiple of the page size, as ``mmap`` returns it.

        Raises:
            UnsupportedError: The installed runtime cannot; copies still work, but they block.
            PlatformError: Refused, for example because a part of the range is pinned already.
        """

    @abstractmethod
    def unpin_host(self, address: int) -> None:
        """Undo `pin_host`; no copy from or to the range may be under way.

        Raises:
            PlatformError: Nothing was pinned at ``address``.
        """

    @abstractmethod
    def share_tensor(self, tensor: torch.Tensor) -> ShareHandle:
        """Make device memory openable by other processes of this host, any number of them.

        Does not wait for work that fills it. Costs the storage a little for the rest of its life,
        so share a slab once rather than each of its parts.

        Args:
            tensor: ``(nbytes,)`` uint8 on a device of this platform. The caller keeps it alive
                until the last opener has closed it; openers do not retain it.

        Raises:
            UnsupportedError: The platform has no device memory to share.
        """

    @abstractmethod
    def open_tensor(self, handle: ShareHandle) -> torch.Tensor:
        """Return ``(nbytes,)`` uint8, the memory that another process shared; both may write it.

        May be called again with the same handle. The tensor counts as one of the device that the
        memory is on, or, where the runtime opens memory of a peer under any device, of the current
        one: then copies from and to it are as asynchronous as within that device.

        Raises:
            UnsupportedError: The platform has no device memory to share, or this process may not
                see the device that the memory is on.
            ValueError: The handle is another platform's.
            PlatformError: The exporter is gone.
        """

    @abstractmethod
    def new_group(self, rendezvous: Rendezvous, *, index: int, timeout_s: float) -> CollectiveGroup:
        """Join a group of processes that exchange tensors of device ``index``.

        Blocks until every rank has joined. Independent of torch's default process group.

        Args:
            rendezvous: Where to meet, under which name and as which rank.
            timeout_s: Seconds from the call; positive.

        Raises:
            TransportTimeoutError: Some rank did not join within ``timeout_s``.
            PeerLostError: Nothing listens at the rendezvous.
        """


@runtime_checkable
class RaisesStreams(Protocol):
    """A `Platform` whose devices compute the work of some streams before that of others."""

    def raise_current_stream(self) -> None:
        """Let later work of the calling thread go before that of all other streams."""
        ...


@runtime_checkable
class LimitsCompute(Protocol):
    """A `Platform` whose processes can keep themselves to a part of a device's compute.

    `UnsupportedError` is raised if the installed runtime is too old.
    """

    def limit_compute(self, index: int, percent: int) -> Mapping[str, int]:
        """Keep this process to a part of a device; return how many units of each kind are left.

        Holds for work that is queued from now on; graphs that were captured before keep what they
        had. May be called once in a process.

        Args:
            percent: Of each kind of unit, 1 to 100; at least one unit is left.
        """
        ...
