"""Census of a run: processes, file descriptors and files."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from epd_portable.launch.run import sessions

SHM = Path("/dev/shm")
_SOCKET = re.compile(r"-\d+-(handshake|in|out)$")


@dataclass(frozen=True)
class Census:
    """Result of a count.

    Attributes:
        processes: Number of processes by name.
        descriptors: Open files by name of the process and kind (socket, pipe, file …).
        files: Of the run, in ``/dev/shm`` and its temporary folder; sockets without the number of
            their engine's start.
    """

    processes: Counter[str]
    descriptors: dict[str, Counter[str]]
    files: Counter[str]

    def growth(self, before: Census, *, slack: int) -> list[str]:
        """Return what there is more of, or less, than before.

        Args:
            before: An earlier count.
            slack: Descriptors of a kind that a process may have more: pooled connections, and what
                is opened when it is first needed.
        """
        found = [
            f"{name}: {self.processes[name]} processes, before {before.processes[name]}"
            for name in self.processes | before.processes
            if self.processes[name] != before.processes[name]
        ]
        found += [
            f"file {name}: {self.files[name]}, before {before.files[name]}"
            for name in sorted(self.files | before.files)
            if self.files[name] != before.files[name]
        ]
        found += [
            f"{name}: {count} of {kind}, before {before.descriptors.get(name, Counter())[kind]}"
            for name, kinds in self.descriptors.items()
            for kind, count in kinds.items()
            if count > before.descriptors.get(name, Counter())[kind] + slack
        ]
        return found


def take(run_id: str, launcher: int, pids: Path, temp_dir: Path) -> Census:
    """Count what a run has.

    Args:
        run_id: Of the run.
        launcher: Its pid.
        pids: Folder of files that hold the pid of the process whose name they bear.
        temp_dir: Of the run.
    """
    names = {int(path.read_text()): path.name for path in pids.iterdir()}
    processes: Counter[str] = Counter()
    descriptors: dict[str, Counter[str]] = {}
    members = [*sessions.members([launcher], run_id)]
    for pid in members:
        name = names.get(pid) or _called(pid)
        kinds = descriptors_of(pid)
        if name and kinds:
            processes[name] += 1
            descriptors.setdefault(name, Counter()).update(kinds)
    files = Counter(str(path) for path in SHM.glob(f"epd-{run_id}-*"))
    files.update(_SOCKET.sub(r"-\1", str(path)) for path in temp_dir.rglob("*"))
    return Census(processes, descriptors, files)


def _called(pid: int) -> str:
    """Return the instance that a process belongs to, or its module; empty if it has ended."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    for variable in environ:
        if variable.startswith(b"EPD_INSTANCE="):
            return variable.partition(b"=")[2].decode()
    return next((word for word in words if "." in word and "/" not in word), words[0])


def descriptors_of(pid: int) -> Counter[str]:
    """Return the open files of a process by kind; none if it has ended."""
    kinds: Counter[str] = Counter()
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            except FileNotFoundError:
                continue
            kinds[target.partition(":")[0] if target[0] != "/" else "file"] += 1
    except (FileNotFoundError, ProcessLookupError):
        pass
    return kinds
