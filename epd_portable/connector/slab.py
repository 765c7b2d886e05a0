"""Device memory that receives encoder outputs: the counterpart of the pool's file in /dev/shm.

A slot has the same offset in the slab as in the file. Rank 0 of an instance has the slab; its other
ranks and the producers open it.
"""

from __future__ import annotations

import msgspec
import torch

from epd_portable.connector.control import process_is_gone
from epd_portable.connector.copies import DeviceCopies
from epd_portable.errors import (
    PeerLostError,
    PlatformError,
    TransportError,
    UnsupportedError,
)
from epd_portable.platforms.base import Platform, ShareHandle
from epd_portable.wire.codec import address_reader, as_address


class _Address(msgspec.Struct, frozen=True):
    session: str
    handle: ShareHandle


_read_address = address_reader(_Address, "device memory")


class DeviceSlab:
    """One piece of device memory, for slots.

    Args:
        copies: Of the worker's device.
        nbytes: Size.
        session: Of this process.

    Raises:
        CapacityError: The device has no room for it.
    """

    def __init__(self, copies: DeviceCopies, nbytes: int, session: str) -> None:
        alignment = copies.platform.traits.slab_alignment_bytes
        memory = copies.allocate(
            nbytes + alignment,
            what=f"{nbytes} bytes of encoder outputs",
            remedy="lower transfer.pool_bytes or gpu_memory_utilization, or set transfer.path to "
            "shm or tcp, which take host memory",
        )
        start = -memory.data_ptr() % alignment
        self._memory = memory[start : start + nbytes]
        handle = copies.platform.share_tensor(self._memory)
        self.address = as_address(_Address(session, handle))

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self._memory.numel()

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return ``(nbytes,)`` uint8 on the device that *is* the memory from ``offset`` on.

        Raises:
            ValueError: The range is not inside the slab.
        """
        return _range(self._memory, offset, nbytes)


class OpenedSlab:
    """The slab of another process.

    Args:
        platform: Of this process; the slab's device must be of the same.
        address: See `DeviceSlab.address`.

    Raises:
        TransportError: ``address`` is none, or that of another platform's memory.
        PeerLostError: The process that has the slab is gone.
        UnsupportedError: It is there, and this process cannot open its memory.
    """

    def __init__(self, platform: Platform, address: str) -> None:
        try:
            found: _Address = _read_address(address)
        except TransportError as error:
            raise TransportError(f"{address[:40]!r} names no device memory: {error}") from error
        self._session = found.session
        if self.is_gone:
            raise PeerLostError(f"device memory of {found.session} is gone with its process")
        try:
            self._memory = platform.open_tensor(found.handle)
        except UnsupportedError:
            raise
        except PlatformError as error:
            if self.is_gone:
                raise PeerLostError(f"device memory of {found.session} is gone: {error}") from error
            # Whoever has it lives: it is refused for as long as both do (containers that share no
            # namespaces, sandboxes, a limit of the driver).
            raise UnsupportedError(
                f"device memory of {found.session}, which lives, cannot be opened here: {error}; "
                "give both instances one IPC and process namespace, or set transfer.path to shm or "
                "tcp"
            ) from error
        except ValueError as error:
            raise TransportError(
                f"device memory of {found.session} cannot be opened here: {error}; "
                "set transfer.path to shm or tcp"
            ) from error

    @property
    def is_gone(self) -> bool:
        """Whether the process that has the slab has certainly ended."""
        return process_is_gone(self._session)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self._memory.numel()

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """See `DeviceSlab.tensor`."""
        return _range(self._memory, offset, nbytes)


def _range(memory: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    if offset < 0 or nbytes <= 0 or offset + nbytes > memory.numel():
        raise ValueError(
            f"bytes {offset} to {offset + nbytes} are outside a slab of {memory.numel()}"
        )
    return memory[offset : offset + nbytes]
