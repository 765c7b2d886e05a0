"""Interface of a transfer path."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from epd_portable.errors import TransportError
from epd_portable.wire.descriptors import SlotDescriptor

if TYPE_CHECKING:
    import torch

    from epd_portable.platforms.base import DeviceEvent
    from epd_portable.transfer.copies import DeviceCopies, QueuedCopy
    from epd_portable.transfer.curve import CurveKeys

MAX_REVOKED = 4096
"""Revoked grants that are remembered one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotWrite:
    """An encoder output for one granted slot.

    Attributes:
        src: On the worker's device, contiguous, of exactly ``slot.nbytes`` bytes; unchanged until
            it is written.
        slot: From the consumer's grant.
        computed: Event behind the work that computes ``src``.
        address: Of the consumer's end of the path, from the grant.
        deadline_s: End of the lease on the clock of the worker's `DeviceCopies`; the slot is not
            touched after it.
    """

    src: torch.Tensor
    slot: SlotDescriptor
    computed: DeviceEvent
    address: str
    deadline_s: float


class PathWriter(ABC):
    """The encode side of one path: writes encoder outputs into granted slots of all consumers.

    It may be called from several threads, whose current device is that of ``copies``.
    """

    def __init__(self, copies: DeviceCopies, keys: CurveKeys) -> None:
        self.copies = copies
        self._keys = keys

    @abstractmethod
    def write(self, item: SlotWrite) -> None:
        """Copy one encoder output into a slot; blocks until its consumer may read the bytes.

        Does not block the device's compute stream.

        Raises:
            LeaseExpiredError: The deadline has passed, or the consumer revoked the grant.
            TransportTimeoutError: Not complete at the deadline; the slot's content is undefined.
            PeerLostError: The consumer is gone.
            UnsupportedError: This process can never write by this path; take another.
            ValueError: The output does not match the slot.
        """

    def queue(self, item: SlotWrite) -> QueuedCopy | None:
        """Begin a `write` that the device makes asynchronously; never waits, and raises as `write`.

        Returns:
            The copy: the consumer may read the bytes when its `QueuedCopy.finish` has returned.
            ``None`` if nothing was begun, because something must be waited for: call `write`.

        Raises:
            PlatformError: The device failed; it does not copy any more.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Release connections and mappings; no copy is under way or begins any more."""

    def _check(self, item: SlotWrite) -> None:
        """Raise `LeaseExpiredError`, or `ValueError` if an output is not what was granted for."""
        check_source(item.src, item.slot, self.copies.device)
        self.copies.check_lease(item.deadline_s)


class ReceiveMemory(Protocol):
    """The memory of slots: the pool's file, or device memory."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return ``(nbytes,)`` uint8 that *is* a range of the memory; `ValueError` if outside."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivingEnd:
    """Resources of a PD instance for the receiver of a path.

    Attributes:
        memory: Returns the memory of slots. A worker calls it when the first item comes: the
            scheduler makes the pool's file after its workers.
        host: Address of this machine to listen on.
        data_address: ZMQ address for ``tcp``.
        fence: In the scheduler's process lets writes to leased slots through, in a worker writes to
            all slots that were not revoked.
        keys: For paths that encrypt; ``None`` in a worker.
        copies: The worker's device; ``None`` in the scheduler's process.
    """

    memory: Callable[[], ReceiveMemory]
    platform: str
    host: str
    data_address: str
    fence: LeaseFence | RevokedFence
    keys: CurveKeys | None = None
    copies: DeviceCopies | None = None


class PathReceiver(ABC):
    """The consumer's end of a path, which receives from its making on.

    It is in the scheduler's process, or with `PathEntry.device_memory` in the worker of rank 0.

    Attributes:
        address: For producers, in each grant.

    Raises:
        ConfigError: Something that the path needs is not installed.
        TransportError: An address cannot be bound.
    """

    address: str

    @abstractmethod
    def __init__(self, end: ReceivingEnd) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Stop receiving; blocks until no write is under way."""


class LeaseFence:
    """Refuses late writes to slots that are not leased any more; for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Condition(threading.Lock())
        self._leased: set[SlotDescriptor] = set()

    def allow(self, slot: SlotDescriptor) -> None:
        """Let writes to this slot through."""
        with self._lock:
            self._leased.add(slot)
            self._lock.notify_all()

    def wait_leased(self, timeout_s: float) -> bool:
        """Return whether a slot is leased, or becomes so within the time."""
        with self._lock:
            return self._lock.wait_for(lambda: bool(self._leased), timeout_s)

    def forbid(self, slot: SlotDescriptor) -> None:
        """Refuse writes from now on; blocks until one that is under way has ended."""
        with self._lock:
            self._leased.discard(slot)

    @contextmanager
    def writing(self, slot: SlotDescriptor) -> Iterator[bool]:
        """Yield whether the slot may be written; that holds until the block ends."""
        with self._lock:
            yield slot in self._leased


class RevokedFence:
    """`LeaseFence` of a worker, which is informed of slots only when they are revoked.

    Generations grow, so the oldest are remembered by their greatest number.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._revoked: OrderedDict[int, None] = OrderedDict()
        self._oldest = 0

    def revoke(self, generation: int) -> None:
        """Refuse writes of this grant from now on; blocks until one under way has ended."""
        with self._lock:
            self._revoked[generation] = None
            if len(self._revoked) > MAX_REVOKED:
                oldest, _ = self._revoked.popitem(last=False)
                self._oldest = max(self._oldest, oldest)

    @contextmanager
    def writing(self, slot: SlotDescriptor) -> Iterator[bool]:
        """See `LeaseFence.writing`."""
        with self._lock:
            yield slot.generation > self._oldest and slot.generation not in self._revoked


def check_source(src: torch.Tensor, slot: SlotDescriptor, device: torch.device) -> None:
    """Raise `ValueError` if a tensor is not exactly what the slot was granted for."""
    nbytes = src.numel() * src.element_size()
    if nbytes != slot.nbytes:
        raise ValueError(
            f"tensor {tuple(src.shape)} {src.dtype} has {nbytes} bytes, the slot {slot.nbytes}: "
            "announce the tensor that will be written"
        )
    if not src.is_contiguous():
        raise ValueError(f"tensor {tuple(src.shape)} is not contiguous: write a contiguous copy")
    if src.device != device:
        raise ValueError(f"tensor is on {src.device}: this worker writes outputs of {device}")


def check_slot(slot: SlotDescriptor, nbytes: int) -> None:
    """Raise `TransportError` if a slot is not inside the consumer's memory of ``nbytes`` bytes."""
    if slot.offset < 0 or slot.offset + slot.nbytes > nbytes:
        raise TransportError(
            f"slot of {slot.nbytes} bytes at {slot.offset} is outside the consumer's memory of "
            f"{nbytes} bytes"
        )
