"""Names of the transfer paths, for files that are read without loading a path."""

from __future__ import annotations

from typing import Literal, get_args

PathName = Literal["auto", "ipc", "shm", "nixl", "collective", "tcp"]
"""``auto``, or a transfer path, described by `epd_portable.transfer.registry`."""
AUTO = "auto"
PATH_NAMES: tuple[str, ...] = get_args(PathName)[1:]
