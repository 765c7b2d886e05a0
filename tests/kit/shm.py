"""A small /dev/shm for one process."""

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
    mount = f"mount -t tmpfs -o size={SHM_BYTES} tmpfs {SHM_FOLDER}"
    begin = ("unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
    tried = subprocess.run([*begin, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no mount namespace here: {tried.stderr.strip()}")
    return begin
