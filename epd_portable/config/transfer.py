"""Names of the transfer paths, for files that are read without loading a path."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

AUTO = "auto"

PATH_NAMES = ("ipc", "shm", "nixl", "collective", "tcp")
"""Transfer paths, described by `epd_portable.transfer.registry`."""


def _known(name: str) -> str:
    if name in (AUTO, *PATH_NAMES):
        return name
    known = ", ".join((AUTO, *PATH_NAMES))
    raise ValueError(f"unknown transfer path {name[:64]!r}; known are {known}")


PathName = Annotated[str, AfterValidator(_known)]
"""``auto``, or the name of a transfer path."""
