"""Processes and shared memory of a run: found, ended, removed.

A process belongs to a run when it is in the session of one that the launcher started (engines
start children of their own), or when ``EPD_RUN_ID`` in its first environment names the run, which
also finds one that was started a moment before its launcher was killed.

vLLM's processes name their shared memory themselves and remove it when they end, or leave that to
a helper process. Killed together, none of them removes it; so what they map is noted while they
live.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import psutil

SHM = Path("/dev/shm")

_POLL_S = 0.05
_TRACKER_PATIENCE_S = 2.0
_KILL_PATIENCE_S = 5.0


def members(sessions: Collection[int], run_id: str | None) -> dict[int, int]:
    """Return the living processes of some sessions, and of a run if it is given.

    By pid; with the pid of the first process of the session of each. The calling process is left
    out.
    """
    found = {}
    for process in psutil.process_iter():
        # It may end meanwhile, or be another user's.
        with contextlib.suppress(psutil.Error, OSError):
            session = os.getsid(process.pid)
            if session not in sessions and (
                run_id is None or process.environ().get("EPD_RUN_ID") != run_id
            ):
                continue
            ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            if process.pid != os.getpid() and not ended:
                found[process.pid] = session
    return found


def end_processes(
    sessions: Collection[int],
    run_id: str | None,
    *,
    grace_s: float,
    hurry: Callable[[], bool] = lambda: False,
) -> list[int]:
    """End all `members`; return the pids that even SIGKILL did not end.

    The first process of each session gets SIGTERM and ends its own children; children without it
    get SIGTERM themselves. What is left after the grace, which ``hurry`` may end, gets SIGKILL,
    resource trackers last.
    """
    asked: set[int] = set()
    started = time.monotonic()
    killed_at: float | None = None
    while True:
        alive = members(sessions, run_id)
        now = time.monotonic()
        if not alive:
            return []
        if killed_at is not None and now - killed_at > _KILL_PATIENCE_S:
            return [*alive]
        if now - started >= grace_s or hurry():
            killed_at = killed_at or now
            patient = now - killed_at < _TRACKER_PATIENCE_S
            for pid in alive:
                if not (patient and _is_tracker(pid)):
                    send_signal(pid, signal.SIGKILL)
        else:
            for pid, session in alive.items():
                led = pid != session and session in alive
                if not led and pid not in asked:
                    asked.add(pid)
                    send_signal(pid, signal.SIGTERM)
        time.sleep(_POLL_S)


def _is_tracker(pid: int) -> bool:
    """Return whether this is Python's resource tracker.

    It outlives the processes that it serves, then removes the shared memory that they left, and
    ends on its own.
    """
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in x for x in psutil.Process(pid).cmdline())
    return False


def send_signal(pid: int, signum: signal.Signals) -> None:
    """Send a signal to a process that may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def remove_shm(prefix: str) -> None:
    """Remove every file of ``/dev/shm`` whose name starts with ``prefix``."""
    for path in SHM.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def mapped_files(pids: Iterable[int]) -> set[Path]:
    """Return the files of ``/dev/shm`` that living processes map.

    By inode: the C library makes a semaphore under another name and links it to its own.
    """
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            lines = Path("/proc", str(pid), "maps").read_text().splitlines()
            # address, permissions, offset, device, inode, path
            inodes.update(int(line.split()[4]) for line in lines if f" {SHM}/" in line)
    with os.scandir(SHM) as entries:
        return {Path(entry.path) for entry in entries if entry.inode() in inodes}


def remove_unused(files: Iterable[Path], *, since: float) -> None:
    """Remove files of ``/dev/shm`` that no living process maps.

    Files that were last changed before ``since``, a Unix time, are kept: they are not the run's.
    """
    if wanted := set(files):
        for path in wanted - mapped_files(psutil.pids()):
            if path.exists() and path.stat().st_ctime >= since:
                path.unlink(missing_ok=True)
