"""Folders and files of the user who runs this: the home, temporary files, caches.

A container may run under a user id that has neither a name nor a home, on a root file system that
is read-only. What must be writable is one folder for temporary files.
"""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Mapping
from pathlib import Path

from epd_portable.errors import ConfigError

_HOME = "epd-home-"
"""Beginning of the name of a home in the folder for temporary files; the user's id follows."""
_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Variables that `getpass.getuser` reads."""
_HUB = ".cache/huggingface"
"""Folder in a home for downloaded models."""


def expanded(path: str) -> Path:
    """Return a path, ``~`` replaced by the user's home.

    Raises:
        ConfigError: The user has none.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path}: user {os.geteuid()} has no home directory. Set HOME, or write an absolute "
            "path."
        ) from error


def file_stamp(path: str) -> tuple[int, int, int]:
    """Return what differs once a file has changed; zeros for one that cannot be seen."""
    try:
        found = os.stat(expanded(path))
    except OSError:  # Reported when it is read.
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def temp_folder() -> Path:
    """Return the folder for temporary files: ``TMPDIR``, by default ``/tmp``.

    Raises:
        ConfigError: No such folder can be written.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(
            f"no folder for temporary files can be written: {error.strerror}. Make one of them "
            "writable, as by an emptyDir at /tmp, or set TMPDIR to another."
        ) from error


def with_home(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables under which libraries find a home that they can write, and a user name.

    A home that cannot be written is replaced by a folder of mode 700 in `temp_folder`, which
    outlives the process. Models that were downloaded into the former home are still found.

    Raises:
        ConfigError: No such folder can be made.
    """
    variables, home = dict(environ), environ.get("HOME")
    try:
        user = pwd.getpwuid(os.geteuid())
        home = home or user.pw_dir
    except KeyError:
        if not any(environ.get(name) for name in _NAMES):
            variables["LOGNAME"] = str(os.geteuid())
    if home and _is_writable(Path(home)):
        variables["HOME"] = home
        return variables
    variables["HOME"] = str(_private_folder(temp_folder() / f"{_HOME}{os.geteuid()}"))
    if home and not environ.get("XDG_CACHE_HOME") and Path(home, _HUB).is_dir():
        variables.setdefault("HF_HOME", str(Path(home, _HUB)))
    return variables


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder for what this package computes once, which may not exist yet.

    Raises:
        ConfigError: See `with_home`.
    """
    cache = environ.get("XDG_CACHE_HOME") or Path(with_home(environ)["HOME"], ".cache")
    return Path(cache, "epd-portable")


def _is_writable(home: Path) -> bool:
    """Return whether a home and its caches can be written; a volume's parents belong to root."""
    folders = [home, *filter(Path.exists, [home / ".cache"])]
    return all(os.access(folder, os.W_OK | os.X_OK) for folder in folders)


def _private_folder(path: Path) -> Path:
    """Make a folder of mode 700 if it is not there.

    Raises:
        ConfigError: It cannot be made, or others could have put something into it.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}. Set HOME.") from error
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path} belongs to user {found.st_uid} and has mode {found.st_mode & 0o777:04o}: "
            "others can write into it. Remove it, or set HOME to a folder that you can write."
        )
    return path
