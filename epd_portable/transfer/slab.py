"""Device memory that receives encoder outputs: the counterpart of the pool's file in /dev/shm.

A slot has the same offset in the slab as in the file. Rank 0 of an instance allocates the slab; its
other ranks and the producers open it.
"""

from __future__ import annotations

import msgspec
import torch

from epd_portable.errors import PeerLostError, PlatformError, TransportError, UnsupportedError
from epd_portable.platforms.base import Platform, ShareHandle
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.pool import check_range
from epd_portable.transfer.sessions import process_is_gone
from epd_portable.wire.codec import address_reader, as_address


class _SlabAddress(msgspec.Struct, frozen=True):
    session: str
    handle: ShareHandle


_read_address = address_reader(_SlabAddress, "device memory")


class Slab:
    """Device memory of slots, ``(nbytes,)`` uint8, of this process or of another one."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._memory.numel()

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return ``(nbytes,)`` uint8 that *is* the memory from ``offset`` on, or `ValueError`."""
        check_range(offset, nbytes, self.nbytes, "a slab")
        return self._memory[offset : offset + nbytes]


class DeviceSlab(Slab):
    """A slab of this process; `CapacityError` if the device has no space for it."""

    def __init__(self, copies: DeviceCopies, nbytes: int, session: str) -> None:
        alignment = copies.platform.traits.slab_alignment_bytes
        memory = copies.allocate(
            nbytes + alignment,
            what=f"{nbytes} bytes of encoder outputs",
            remedy="lower transfer.pool_bytes or gpu_memory_utilization, or set transfer.path to "
            "shm or tcp, which take host memory",
        )
        start = -memory.data_ptr() % alignment
        super().__init__(memory[start : start + nbytes])
        handle = copies.platform.share_tensor(self._memory)
        self.address = as_address(_SlabAddress(session, handle))


class OpenedSlab(Slab):
    """The slab of another process of the same platform, by its `DeviceSlab.address`.

    Raises:
        TransportError: ``address`` is invalid, or that of another platform's memory.
        PeerLostError: The process that has the slab is gone.
        UnsupportedError: It lives, and this process cannot open its memory.
    """

    def __init__(self, platform: Platform, address: str) -> None:
        found: _SlabAddress = _read_address(address)
        self._session = found.session
        if self.is_gone:
            raise PeerLostError(f"device memory of {found.session} is gone with its process")
        try:
            super().__init__(platform.open_tensor(found.handle))
        except UnsupportedError:
            raise
        except PlatformError as error:
            if self.is_gone:
                raise PeerLostError(f"device memory of {found.session} is gone: {error}") from error
            # Refused for as long as both processes live (containers that share no namespaces,
            # sandboxes, a limit of the driver).
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
        """Return whether the process that has the slab has certainly ended."""
        return process_is_gone(self._session)
