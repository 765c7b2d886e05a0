"""What a transfer path must do, whichever it is."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epd_portable.wire.descriptors import SlotDescriptor

if TYPE_CHECKING:
    import torch

Clock = Callable[[], float]
"""Monotonic seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportCapabilities:
    """What one path can do, known without loading it.

    Attributes:
        same_host: Both ends must share ``/dev/shm``.
        device_memory: Moves device memory without a copy through the host.
        zero_copy: On CPU the injected tensor is the written memory itself.
        one_sided: The consumer's workers take no part in the transfer.
        fenced: A write that comes after its lease ended cannot touch the slot, because the
            consumer's own process does the last step.
    """

    same_host: bool
    device_memory: bool
    zero_copy: bool
    one_sided: bool
    fenced: bool


class Transport(ABC):
    """The encode side of one path: writes encoder outputs into granted slots.

    One object serves all consumers of its process and may be called from several threads.
    """

    @abstractmethod
    def write(
        self, src: torch.Tensor, slot: SlotDescriptor, *, address: str, deadline_s: float
    ) -> None:
        """Copy one encoder output into the slot that its consumer granted.

        Blocks until the consumer may read the bytes.

        Args:
            src: Host tensor, contiguous, of exactly ``slot.nbytes`` bytes.
            slot: From the consumer's grant; still leased.
            address: From the grant.
            deadline_s: Point of this transport's clock (``time.monotonic`` unless another was
                given) at which the lease ends; the slot is not touched after it.

        Raises:
            LeaseExpiredError: ``deadline_s`` has passed, or the consumer took the slot back; ask
                for a new grant.
            TransportTimeoutError: Not complete at ``deadline_s``; the slot's content is undefined.
            PeerLostError: The consumer is gone.
            ValueError: ``src`` does not match ``slot``.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections and mappings; the object is not used any more."""


class Receiver(ABC):
    """The consumer's end of a path that needs somebody there."""

    @property
    @abstractmethod
    def address(self) -> str:
        """What producers are told in a grant."""

    @abstractmethod
    def close(self) -> None:
        """Stop receiving; blocks until no write is under way."""


class LeaseFence:
    """Keeps late writes away from slots that are leased no more.

    Used by receivers that write into the pool themselves; safe from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leased: set[SlotDescriptor] = set()

    def allow(self, slot: SlotDescriptor) -> None:
        """Let writes to this slot through."""
        with self._lock:
            self._leased.add(slot)

    def forbid(self, slot: SlotDescriptor) -> None:
        """Refuse writes from now on; blocks until one that is under way has ended."""
        with self._lock:
            self._leased.discard(slot)

    @contextmanager
    def writing(self, slot: SlotDescriptor) -> Iterator[bool]:
        """Tell whether the slot may be written; it stays so until the block ends."""
        with self._lock:
            yield slot in self._leased


def check_source(src: torch.Tensor, slot: SlotDescriptor) -> None:
    """Refuse a tensor that is not exactly what the slot was granted for.

    Raises:
        ValueError: Names both sides of the mismatch.
    """
    nbytes = src.numel() * src.element_size()
    if nbytes != slot.nbytes:
        raise ValueError(
            f"tensor {tuple(src.shape)} {src.dtype} has {nbytes} bytes, the slot {slot.nbytes}: "
            "announce the tensor that will be written"
        )
    if not src.is_contiguous():
        raise ValueError(f"tensor {tuple(src.shape)} is not contiguous: write a contiguous copy")
    if not src.is_cpu:
        raise ValueError(f"tensor is on {src.device}: this path writes host memory")
