"""What runs here: each launcher writes it into the folder of its run, and commands read it.

The file says which processes were started and when, not which still live: that is asked of Linux
each time. A launcher lives as long as it holds the lock on its folder, a process as long as one
with its pid *and its start time* is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

RUN_FOLDER = "epd-"
"""What the name of a run's folder begins with; the id of the run follows."""
STATE_FILE = "run.json"
_A_RUN = re.compile(rf"{RUN_FOLDER}[0-9a-f]{{8}}")
_MAX_BYTES = 4 << 20


class ProcessRecord(BaseModel):
    """One process of a run.

    Attributes:
        state: ``starting``, ``up``, ``ending``, or ``waiting`` to be started (again); when it is
            read, ``gone`` for one that was started and does not live.
        ports: All that it listens on, by purpose.
        log: Path of its log file.
        pid: Of the last one that was started; when it is read, only if that lives.
        started_ticks: Its start time, in clock ticks since boot.
        uptime_s: When it is read, of one that lives.
    """

    name: str
    role: str
    state: str
    url: str
    ports: dict[str, int]
    log: str
    pid: int | None = None
    started_ticks: int = 0
    restarts: int = 0
    uptime_s: float | None = None


class RunRecord(BaseModel):
    """One run, as its launcher writes it down.

    Attributes:
        phase: ``starting``, ``serving`` or ``stopping``.
        config: Topology file; empty where it is not known.
        processes: All of the plan, in its order.
        lives: When it is read, whether the launcher does.
        uptime_s: Of the launcher, if it lives.
    """

    run_id: str
    phase: str
    platform: str
    model: str
    url: str
    config: str
    pid: int
    started_ticks: int
    processes: tuple[ProcessRecord, ...]
    lives: bool = False
    uptime_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        ticks: Any = {"started_ticks": True, "processes": {"__all__": {"started_ticks"}}}
        return self.model_dump(mode="json", exclude=ticks)


def start_ticks(pid: int) -> int:
    """Return when a process was started, in clock ticks since boot; 0 if it does not live."""
    try:
        # The command name is in parentheses and may hold spaces: fields count from its end.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def write_record(folder: Path, record: RunRecord) -> None:
    """Replace the record in a folder, atomically.

    Raises:
        OSError: It cannot be written; the last one is still there.
    """
    new = folder / f"{STATE_FILE}.new"
    new.write_text(record.model_dump_json(), "utf-8")
    new.replace(folder / STATE_FILE)


def find_runs(temp_dir: Path) -> list[RunRecord]:
    """Return this user's runs of which something lives, the oldest first, by their folders."""
    found: list[RunRecord] = []
    for folder in temp_dir.glob(f"{RUN_FOLDER}*"):
        with contextlib.suppress(OSError, ValidationError):
            seen = folder.lstat()
            # What another user wrote may say anything.
            ours = stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid()
            if ours and _A_RUN.fullmatch(folder.name):
                run = _read_run(folder)
                if run.lives or any(each.uptime_s is not None for each in run.processes):
                    found.append(run)
    return sorted(found, key=lambda run: (-(run.uptime_s or 0.0), run.run_id))


def _read_run(folder: Path) -> RunRecord:
    """Read a record, and note what of it lives at this moment."""
    lives = _is_locked(folder)
    with (folder / STATE_FILE).open("rb") as file:
        record = RunRecord.model_validate_json(file.read(_MAX_BYTES))
    now_s = float(Path("/proc/uptime").read_text("ascii").split()[0])
    for each in record.processes:
        was_started = each.pid is not None
        each.uptime_s = _age_s(each, now_s)
        if each.uptime_s is None:
            each.pid = None
            if was_started and each.state != "waiting":
                each.state = "gone"
    record.lives = lives
    record.uptime_s = _age_s(record, now_s) if lives else None
    return record


def _age_s(record: RunRecord | ProcessRecord, now_s: float) -> float | None:
    """Return how long a process has lived, at a time since boot; ``None`` if it does not."""
    if record.pid is None or start_ticks(record.pid) != record.started_ticks:
        return None
    return round(max(0.0, now_s - record.started_ticks / os.sysconf("SC_CLK_TCK")), 1)


def _is_locked(folder: Path) -> bool:
    """Return whether a launcher holds its folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
