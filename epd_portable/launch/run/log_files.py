"""Logs, and the folder of a run: readable by their user only.

Logs show what requests hold, and the folder of a run has its secret. Writers have a log open to
append, so that others may truncate it while they write, as ``logrotate`` does (``copytruncate``).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from epd_portable.errors import ConfigError, LaunchError

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


class Tail:
    """Reads the end of a log that others append to and truncate; it may not exist yet."""

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
        # Truncated meanwhile, if it is shorter.
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
