"""Processes and shared memory of a run: found, ended, removed.

A process belongs to a run when it is in the session of one that the launcher started (engines
start children of their own), or when ``EPD_RUN_ID`` in its first environment says so, which also
finds one that was started a moment before its launcher was killed.

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
from dataclasses import dataclass
from pathlib import Path

import psutil

SHM = Path("/dev/shm")

_POLL_S = 0.05
_TRACKER_PATIENCE_S = 2.0
_KILL_PATIENCE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One line of the process table.

    Attributes:
        session: Pid of the first process of its session.
        cleans_up: Whether it is Python's resource tracker, which outlives the processes that it
            serves, then removes the shared memory that they left, and ends by itself.
    """

    pid: int
    session: int
    cleans_up: bool


def members(sessions: Collection[int], run_id: str | None) -> list[Process]:
    """Return the living processes of some sessions, and of a run if it is given.

    The calling process is left out.
    """
    found = []
    for process in psutil.process_iter():
        # It may end meanwhile, or be another user's.
        with contextlib.suppress(psutil.Error, OSError):
            session = os.getsid(process.pid)
            if session not in sessions and (
                run_id is None or process.environ().get("EPD_RUN_ID") != run_id
            ):
                continue
            if process.pid == os.getpid() or process.status() in (
                psutil.STATUS_ZOMBIE,
                psutil.STATUS_DEAD,
            ):
                continue
            cleans_up = any("multiprocessing.resource_tracker" in x for x in process.cmdline())
            found.append(Process(pid=process.pid, session=session, cleans_up=cleans_up))
    return found


def end_processes(
    sessions: Collection[int],
    run_id: str | None,
    *,
    grace_s: float,
    reap: Callable[[], object] = lambda: None,
    hurry: Callable[[], bool] = lambda: False,
) -> list[int]:
    """End all `members`; return the pids that even SIGKILL did not end.

    The first process of each session gets SIGTERM and ends its own children; children without it
    get SIGTERM themselves. What is left after the grace gets SIGKILL, resource trackers last.
    Meanwhile ``reap`` collects the exit status of children, and ``hurry`` may end the grace.
    """
    asked: set[int] = set()
    started = time.monotonic()
    killed_at: float | None = None
    while True:
        reap()
        alive = members(sessions, run_id)
        now = time.monotonic()
        if not alive:
            return []
        if killed_at is not None and now - killed_at > _KILL_PATIENCE_S:
            return [process.pid for process in alive]
        if now - started >= grace_s or hurry():
            killed_at = killed_at or now
            patient = now - killed_at < _TRACKER_PATIENCE_S
            for process in alive:
                if not (process.cleans_up and patient):
                    send_signal(process.pid, signal.SIGKILL)
        else:
            pids = {process.pid for process in alive}
            for process in alive:
                led = process.pid != process.session and process.session in pids
                if not led and process.pid not in asked:
                    asked.add(process.pid)
                    send_signal(process.pid, signal.SIGTERM)
        time.sleep(_POLL_S)


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
