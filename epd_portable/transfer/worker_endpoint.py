"""The receiving end in a PD instance's workers.

Workers are made before their scheduler: rank 0 writes what it has opened into a file next to the
pool, and the scheduler and the other ranks read it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from epd_portable.config.instance import AUTO
from epd_portable.errors import CapacityError, TransportError, UnsupportedError
from epd_portable.transfer import registry
from epd_portable.transfer.paths.base import ReceivingEnd, RevokedFence
from epd_portable.transfer.pool import SHM_FOLDER, SharedMemory, check_private
from epd_portable.transfer.sessions import new_session, process_is_gone
from epd_portable.transfer.slab import DeviceSlab, OpenedSlab, Slab
from epd_portable.wire.descriptors import PathEndpoint

if TYPE_CHECKING:
    from epd_portable.config.instance import InstanceConfig
    from epd_portable.transfer.copies import DeviceCopies


logger = logging.getLogger(__name__)

_RANK_0_TIMEOUT_S = 60.0
"""Ranks of one instance open their ends at about the same time: they have just met."""
_LOOK_EVERY_S = 0.05


class Publication(msgspec.Struct, frozen=True):
    """Resources that rank 0 has opened; ``slab`` is the address of its device memory, or empty."""

    session: str
    slab: str
    paths: tuple[PathEndpoint, ...]


def read_publication(pool: str) -> Publication:
    """Return what rank 0 of the instance with this pool has opened.

    Raises:
        TransportError: It has opened nothing, or has ended; or another user wrote the file.
    """
    path = _published_at(pool)
    try:
        # Another user may have taken the name before.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            check_private(path, os.fstat(descriptor))
            found = msgspec.msgpack.decode(file.read(), type=Publication)
    except FileNotFoundError as error:
        raise TransportError(
            f"{path} is not there: the instance's workers must be those of epd-portable "
            "(--worker-cls), in the same /dev/shm as its scheduler"
        ) from error
    except OSError as error:
        raise TransportError(f"{path} cannot be read: {error}; look who put it there") from error
    if process_is_gone(found.session):
        raise TransportError(f"{path} was written by {found.session}, which has ended")
    return found


class WorkerEndpoint:
    """Access of a worker to the slots of its instance; rank 0 receives for all.

    Raises:
        CapacityError: The device has no space for the slab, or ``/dev/shm`` for a small file.
        TransportError: An address cannot be bound, or rank 0 has not opened its end.
        UnsupportedError: The device's memory cannot be shared, or this rank cannot open rank 0's.
    """

    def __init__(self, config: InstanceConfig, copies: DeviceCopies, rank: int = 0) -> None:
        self._config = config
        self._copies = copies
        self._fence = RevokedFence()
        self._opened = contextlib.ExitStack()
        self._slab: Slab | None = None
        paths = [path for path in registry.offered_by(config) if path.device_memory]
        if paths and rank == 0:
            self._open(paths)
        elif self._in_slab(paths):
            # Not in the step that first needs it: an error there ends the engine.
            self._slab = self._open_slab()

    @property
    def slab_bytes(self) -> int:
        """Device memory that this worker holds for slots."""
        return self._config.pool_bytes if isinstance(self._slab, DeviceSlab) else 0

    @cached_property
    def host(self) -> SharedMemory:
        """The pool's file; the scheduler has made it before the first slot is granted."""
        pool = SharedMemory.open(self._config.pool)
        self._copies.pin(pool)
        return pool

    @property
    def slab(self) -> Slab:
        """The instance's device memory for slots; `TransportError` if there is none."""
        if self._slab is None:
            raise TransportError("this instance has no device memory for items")
        return self._slab

    def revoke(self, generations: Iterable[int]) -> None:
        """Refuse writes for these grants; blocks until a write under way has ended."""
        for generation in generations:
            self._fence.revoke(generation)

    def close(self) -> None:
        """Stop receiving."""
        self._opened.close()

    def _in_slab(self, paths: Iterable[registry.PathEntry]) -> list[str]:
        """Return which of these paths write into device memory."""
        platform = self._config.platform
        return [path.name for path in paths if registry.in_device_memory(path.name, platform)]

    def _open_slab(self) -> OpenedSlab | None:
        """Open rank 0's slab, once that is published; ``None`` if it has none."""
        deadline_s = time.monotonic() + _RANK_0_TIMEOUT_S
        while True:
            try:
                address = read_publication(self._config.pool).slab
            except TransportError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(_LOOK_EVERY_S)
            else:
                return OpenedSlab(self._copies.platform, address) if address else None

    def _open(self, paths: list[registry.PathEntry]) -> None:
        config, session = self._config, new_session()
        slab = ""
        if in_slab := self._in_slab(paths):
            try:
                made = DeviceSlab(self._copies, config.pool_bytes, session)
            except UnsupportedError as error:
                if config.path != AUTO:
                    raise
                logger.warning("not offered: %s: %s", ", ".join(in_slab), error)
                paths = [path for path in paths if path.name not in in_slab]
            else:
                self._slab, slab = made, made.address
        end = ReceivingEnd(
            memory=lambda: self.host if self._slab is None else self._slab,
            platform=config.platform,
            host=config.host,
            data_address=config.data_address,
            fence=self._fence,
            copies=self._copies,
        )
        with contextlib.ExitStack() as opened:
            endpoints = tuple(registry.open_receivers(paths, end, opened, memory=slab))
            publication = Publication(session=session, slab=slab, paths=endpoints)
            self._publish(publication, opened)
            self._opened = opened.pop_all()

    def _publish(self, publication: Publication, opened: contextlib.ExitStack) -> None:
        path = _published_at(self._config.pool)
        fresh = path.with_suffix(f".{os.getpid()}")
        try:
            fresh.unlink(missing_ok=True)  # Of a former process of this number.
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.msgpack.encode(publication))
            fresh.replace(path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise CapacityError(
                f"{path} cannot be written: {error}; enlarge {SHM_FOLDER}"
            ) from error
        opened.callback(path.unlink, missing_ok=True)


def _published_at(pool: str) -> Path:
    return SHM_FOLDER / f"{pool}.worker"
