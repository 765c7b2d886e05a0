"""CPU time that processes have used, seen from outside."""

from __future__ import annotations

import time

import psutil

_SCHEDULED = 2
"""Linux's clock of a process's time on cores, which counts finer than ``/proc`` shows it."""


def tree_s(pid: int) -> float:
    """Return what a process and everything that it started have used so far."""
    root = psutil.Process(pid)
    return own_s(root) + sum(map(own_s, root.children(recursive=True)))


def own_s(process: psutil.Process) -> float:
    """Return what one process has used so far, without its children; 0 once it is gone."""
    try:
        return time.clock_gettime(~process.pid << 3 | _SCHEDULED)
    except OSError:
        return 0.0
