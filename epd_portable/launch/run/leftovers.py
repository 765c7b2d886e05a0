"""Shared memory that an engine leaves in ``/dev/shm`` when it is killed.

vLLM's processes name their shared memory themselves and remove it when they end, or leave that to
a helper process of theirs. Killed together, nobody removes it; so what they map is noted while they
live.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from epd_portable.launch.run.sessions import SHM


def mapped_files(pids: Iterable[int]) -> set[Path]:
    """Return the files of ``/dev/shm`` that processes map; those that ended map none.

    By inode: the C library makes a semaphore under another name and links it to its own.
    """
    inodes: set[int] = set()
    for pid in pids:
        try:
            lines = Path("/proc", str(pid), "maps").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        # address, permissions, offset, device, inode, path
        inodes.update(int(line.split()[4]) for line in lines if f" {SHM}/" in line)
    with os.scandir(SHM) as entries:
        return {Path(entry.path) for entry in entries if entry.inode() in inodes}


def remove_unused(files: Iterable[Path], *, since: float) -> None:
    """Remove files that no living process maps.

    Args:
        files: In ``/dev/shm``.
        since: Files that were last changed before this time of the wall clock are not the run's.
    """
    wanted = set(files)
    if not wanted:
        return
    in_use = mapped_files(int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    for path in wanted - in_use:
        if path.exists() and path.stat().st_ctime >= since:
            path.unlink(missing_ok=True)
