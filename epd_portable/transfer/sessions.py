"""Sessions, which name processes, and whether such a process is gone."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from epd_portable.wire.descriptors import PeerDescriptor


def new_session() -> str:
    """Return a unique name for this process, see `process_is_gone`."""
    pid = os.getpid()
    _, start = _process(pid)
    return f"{pid}-{start}-{_pid_namespace()}-{uuid.uuid4().hex[:12]}"


def process_is_gone(session: str) -> bool:
    """Return whether the process that made a session on this host has certainly ended.

    A zombie has ended once it has no thread left: until then a device may write for it. Pids of
    another namespace (a container that shares ``/dev/shm``) are unknown here.
    """
    parts = session.split("-")
    if len(parts) != 4 or not parts[0].isdecimal() or parts[2] != _pid_namespace():
        return False
    pid = int(parts[0])
    try:
        state, start = _process(pid)
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return not _pid_exists(pid)
    return start != parts[1] or (state in ("Z", "X") and threads <= 1)


def is_later_incarnation(later: PeerDescriptor, earlier: PeerDescriptor) -> bool:
    """Return whether one process is a later incarnation of another on the same machine.

    An instance is started again only after its former processes have ended. On another machine the
    former one may be cut off and alive.
    """

    def instance(peer: PeerDescriptor) -> tuple[str, str]:
        return peer.instance, peer.host.partition(":")[0]

    def start(peer: PeerDescriptor) -> int:
        """Return the clock ticks of the machine at which the process started."""
        parts = peer.session.split("-")
        return int(parts[1]) if len(parts) == 4 and parts[1].isdecimal() else 0

    same = instance(later) == instance(earlier) and later.session != earlier.session
    return same and start(later) >= start(earlier)


def _process(pid: int) -> tuple[str, str]:
    """Return state and start time of a process, as in ``/proc/<pid>/stat``."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _pid_exists(pid: int) -> bool:
    """Return whether there is such a process, also where ``/proc`` hides those of other users."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _pid_namespace() -> str:
    return "".join(filter(str.isdecimal, os.readlink("/proc/self/ns/pid")))


def host_identity() -> str:
    """Return a string that is equal for processes that share a host and its ``/dev/shm``."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    boot = boot_id.read_text().strip() if boot_id.exists() else socket.gethostname()
    shm = Path("/dev/shm")
    return f"{boot}:{shm.stat().st_dev if shm.exists() else 'none'}"
