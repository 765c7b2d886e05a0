"""CPU time that a server's processes have used, seen from outside."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import psutil

PD_ROLE = '"ec_role": "ec_consumer"'
_SCHEDULED = 2
"""Linux's clock of a process's time on cores, which counts finer than ``/proc`` shows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTime:
    """Seconds of CPU, in user mode and in the kernel.

    Attributes:
        prefill_decode_s: Of the prefill+decode instances; of everything where there is no split.
        whole_s: Of everything.
    """

    prefill_decode_s: float
    whole_s: float

    def __sub__(self, earlier: CpuTime) -> CpuTime:
        """Return what was used since an earlier reading."""
        return CpuTime(
            prefill_decode_s=self.prefill_decode_s - earlier.prefill_decode_s,
            whole_s=self.whole_s - earlier.whole_s,
        )

    def shared(self, count: int) -> CpuTime:
        """Return the share of one of ``count`` that used it together."""
        return CpuTime(prefill_decode_s=self.prefill_decode_s / count, whole_s=self.whole_s / count)


def read(pid: int) -> CpuTime:
    """Return what a server has used so far.

    Args:
        pid: Of the command that was started: a launcher, or an engine's server.
    """
    root = psutil.Process(pid)
    whole_s = own_s(root)
    parts_s = []
    for child in root.children():
        # Each process is read once, so that the part is never more than the whole.
        used_s = _tree_s(child)
        whole_s += used_s
        if _receives(child):
            parts_s.append(used_s)
    return CpuTime(prefill_decode_s=sum(parts_s) if parts_s else whole_s, whole_s=whole_s)


def _receives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(PD_ROLE in word for word in process.cmdline())
    return False


def _tree_s(root: psutil.Process) -> float:
    used_s = own_s(root)
    with contextlib.suppress(psutil.NoSuchProcess):
        used_s += sum(map(own_s, root.children(recursive=True)))
    return used_s


def own_s(process: psutil.Process) -> float:
    """Return what one process has used so far, without its children; 0 once it is gone."""
    try:
        return time.clock_gettime(~process.pid << 3 | _SCHEDULED)
    except OSError:
        return 0.0
