"""A small disk or /dev/shm for one process and its children."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from epd_portable.transfer.pool import SHM_FOLDER

ROOT = Path(__file__).parents[2]


SHM_BYTES = 1 << 20


def small_shm() -> tuple[str, ...]:
    """Return a command's beginning by which it gets a /dev/shm of its own, of one MiB.

    Skips the test where that is not allowed.
    """
    return small_disk(SHM_FOLDER, SHM_BYTES)


def small_disk(folder: Path, nbytes: int) -> tuple[str, ...]:
    """Return a command's beginning by which it gets a small disk of its own at a folder.

    Skips the test where that is not allowed.
    """
    mount = f"mount -t tmpfs -o size={nbytes} tmpfs {folder}"
    begin = ("unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
    tried = subprocess.run([*begin, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no mount namespace here: {tried.stderr.strip()}")
    return begin
