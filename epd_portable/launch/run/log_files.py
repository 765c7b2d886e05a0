"""Logs, and the folder of a run: readable by their user only, within a size.

Logs show what requests hold, and the folder of a run has its secret. A log that is full is copied
aside and truncated where it is: its writers have it open to append and go on at its new end. No
pipe can fill up or break, and with the launcher dead logs merely grow. What is written between the
end of the copy and the truncation, some microseconds, is lost.
"""

from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path
from typing import BinaryIO

from epd_portable.errors import ConfigError, LaunchError

_CHUNK_BYTES = 1 << 20
_TAIL_BYTES = 256 << 10


def make_private_folder(path: Path) -> None:
    """Make a new folder of mode 700, whatever the umask.

    Raises:
        FileExistsError: There is something of that name, perhaps not ours.
    """
    path.mkdir(mode=0o700)
    path.chmod(0o700)


def use_log_folder(path: Path) -> None:
    """Make a folder for logs, or take one that is there.

    One that others may enter is closed to them if it holds nothing but logs. One that holds more,
    such as ``/var/log``, is refused rather than changed; so is one of another user, who could put
    links in place of logs.

    Raises:
        ConfigError: It cannot be made or used; says what to do.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            make_private_folder(path)
            return
        except FileExistsError:
            found = path.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"log folder {path} is no folder: name another")
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"log folder {path} belongs to user {found.st_uid}, who could put other files in "
                "place of logs: name a folder of your own, or a new one"
            )
        mode = stat.S_IMODE(found.st_mode)
        if mode == 0o700:
            return
        other = next((each.name for each in path.iterdir() if not _is_log(each)), None)
        if mode & 0o077 and other is not None:
            raise ConfigError(
                f"log folder {path} has mode {mode:04o}, and others must not read logs; it holds "
                f"more than logs ({other}) and is left as it is: name a folder for logs only, or "
                f"chmod 700 {path}"
            )
        path.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"log folder {path} cannot be used: {error}") from error


def _is_log(path: Path) -> bool:
    """Return whether this is ``<name>.log``, or an older part of one: ``<name>.log.1``."""
    found = path.lstat()
    of_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return of_ours and (path.suffix == ".log" or path.with_suffix("").suffix == ".log")


def open_log(path: Path) -> BinaryIO:
    """Open a log, a new one or one of an earlier run, to append to it.

    Raises:
        LaunchError: It cannot be opened, or is a link or another user's.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.fdopen(os.open(path, flags, 0o600), "ab")
        os.fchmod(file.fileno(), 0o600)
    except OSError as error:
        raise LaunchError(f"log {path} cannot be written: {error}") from error
    return file


def rotate(log: Path, *, max_bytes: int, files: int) -> None:
    """Truncate a log that is larger than ``max_bytes``; keep about the last ``max_bytes`` of it.

    Raises:
        FileNotFoundError: There is no such log.
        OSError: It cannot be copied; it was truncated all the same.
    """
    descriptor = os.open(log, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if size > max_bytes:
            try:
                end = size + max_bytes
                _keep(descriptor, log, begin=max(0, size - max_bytes), end=end, files=files)
            finally:
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _keep(source: int, log: Path, *, begin: int, end: int, files: int) -> None:
    """Copy a log from ``begin`` to where it ends, but at most ``end``, and forget the oldest."""
    older = [log.with_name(f"{log.name}.{number}") for number in range(1, files)]
    for path in log.parent.glob(f"{log.name}.[0-9]*"):
        if path not in older[:-1]:
            path.unlink()
    for path, older_path in reversed([*itertools.pairwise(older)]):
        if path.exists():
            path.rename(older_path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    copy = os.open(older[0], flags, 0o600)
    try:
        os.fchmod(copy, 0o600)
        # It grows meanwhile; the truncation follows the first time that nothing more is there.
        while begin < end and (data := os.pread(source, min(_CHUNK_BYTES, end - begin), begin)):
            begin += os.write(copy, data)
    except OSError:
        older[0].unlink()
        raise
    finally:
        os.close(copy)


class Tail:
    """Reads the end of a log that others append to and rotate; it may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._rest = b""

    def last(self, count: int) -> list[str]:
        """Return the last lines."""
        data = self._read(max(0, self._size() - _TAIL_BYTES))
        lines = data.decode("utf-8", "replace").splitlines()
        return lines[max(0, len(lines) - count) :]

    def new(self) -> list[str]:
        """Return the lines that were completed since the last look."""
        # Rotated meanwhile, if it is shorter.
        begin = self._place if self._size() >= self._place else 0
        *whole, self._rest = (self._rest + self._read(begin)).split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def _read(self, begin: int) -> bytes:
        if not self._path.exists():
            return b""
        with self._path.open("rb") as file:
            file.seek(begin)
            data = file.read(_TAIL_BYTES)
            self._place = file.tell()
        return data
