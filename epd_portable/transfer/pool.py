"""The memory of a consumer's receive pool: a file in ``/dev/shm``."""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from epd_portable.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    import torch

SHM_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"epd-[A-Za-z0-9][A-Za-z0-9._@-]{0,200}")


def path_of(name: str) -> Path:
    """Return the file of a pool; `ValueError` if it is no name of a pool."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a receive pool: expected {_NAME.pattern}")
    return SHM_FOLDER / name


def check_private(
    path: Path, found: os.stat_result, kind: Callable[[int], bool] = stat.S_ISREG
) -> None:
    """Raise `PermissionError` unless a file is of a kind, this user's, and closed to all others."""
    if kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return
    raise PermissionError(
        errno.EPERM,
        f"{path} is {stat.filemode(found.st_mode)} of user {found.st_uid}, not a file of user "
        f"{os.geteuid()} that no other user may open; look who put it there",
    )


def check_range(offset: int, nbytes: int, size: int, what: object) -> None:
    """Raise `ValueError` if a range is not inside ``what``, which has ``size`` bytes."""
    if offset < 0 or nbytes <= 0 or offset + nbytes > size:
        raise ValueError(f"bytes {offset} to {offset + nbytes} are outside {what} of {size}")


class SharedMemory:
    """A file in ``/dev/shm``, mapped as long as this object or any tensor made from it lives."""

    def __init__(self, path: Path, nbytes: int, descriptor: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._inode = os.fstat(descriptor).st_ino
        try:
            self._map = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)

    @property
    def identity(self) -> str:
        """Identifies this file: one that is made again at the same path has another."""
        return str(self._inode)

    @classmethod
    def create(cls, name: str, nbytes: int) -> SharedMemory:
        """Make the file with all its memory; a file of that name left by a dead owner is replaced.

        Raises:
            CapacityError: ``/dev/shm`` has no space for it.
            ConfigError: The file of that name cannot be replaced: another user's, or no file.
            ValueError: It is no name of a pool.
        """
        path = path_of(name)
        try:
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"receive pool {path} cannot be made: {error.strerror}; remove what has that name, "
                "which is not this user's, and look who put it there"
            ) from error
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            left = os.statvfs(SHM_FOLDER)
            raise CapacityError(
                f"receive pool of {nbytes} bytes: {SHM_FOLDER} has "
                f"{left.f_bavail * left.f_frsize} free; lower transfer.pool_bytes or enlarge "
                f"{SHM_FOLDER}"
            ) from error
        return cls(path, nbytes, descriptor)

    @classmethod
    def open(cls, name: str) -> SharedMemory:
        """Map a pool that another process of this user made.

        The name comes from a peer: it must not lead to any other file that this user may write.

        Raises:
            FileNotFoundError: There is none of that name.
            PermissionError: See `check_private`.
            OSError: It is a link.
            ValueError: It is no name of a pool.
        """
        path = path_of(name)
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        try:
            check_private(path, found)
        except PermissionError:
            os.close(descriptor)
            raise
        return cls(path, found.st_size, descriptor)

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return ``(nbytes,)`` uint8 on CPU that *is* the memory from ``offset`` on."""
        import torch

        return torch.frombuffer(self.buffer(offset, nbytes), dtype=torch.uint8)

    def buffer(self, offset: int, nbytes: int) -> memoryview:
        """Return the ``nbytes`` bytes from ``offset`` on, writable; `ValueError` if outside."""
        check_range(offset, nbytes, self.nbytes, self.path)
        return memoryview(self._map)[offset : offset + nbytes]

    def is_current(self) -> bool:
        """Return whether the file is still the mapped one: its owner may have made it again."""
        try:
            return self.path.stat().st_ino == self._inode
        except FileNotFoundError:
            return False

    def unlink(self) -> None:
        """Remove the file; mappings stay usable."""
        self.path.unlink(missing_ok=True)
