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
from dataclasses import dataclass
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
        state: ``starting``, ``up``, ``ending``, or ``waiting`` to be started (again).
        ports: All that it listens on, by purpose.
        log: Path of its log file.
        pid: Of the last one that was started; 0 for none.
        started_ticks: Its start time, in clock ticks since boot.
    """

    name: str
    role: str
    state: str
    url: str
    ports: dict[str, int]
    log: str
    pid: int = 0
    started_ticks: int = 0
    restarts: int = 0


class RunRecord(BaseModel):
    """One run, as its launcher writes it down.

    Attributes:
        phase: ``starting``, ``serving`` or ``stopping``.
        url: Base address for clients.
        config: Topology file; empty where it is not known.
        pid: Of the launcher.
        processes: All of the plan, in its order.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenRun:
    """A run that was found, and what of it lives at this moment.

    Attributes:
        record: What its launcher wrote last.
        lives: Whether the launcher does.
        uptime_s: Of the launcher; ``None`` where it does not live.
        process_uptime_s: Of each process that lives, by its name.
    """

    record: RunRecord
    lives: bool
    uptime_s: float | None
    process_uptime_s: dict[str, float]

    def state_of(self, process: ProcessRecord) -> str:
        """Return the state of a process; ``gone`` if it was started and does not live."""
        started = process.pid and process.state != "waiting"
        return process.state if process.name in self.process_uptime_s or not started else "gone"

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        found = self.record.model_dump(mode="json", exclude={"started_ticks"})
        for process, shown in zip(self.record.processes, found["processes"], strict=True):
            del shown["started_ticks"]
            uptime_s = self.process_uptime_s.get(process.name)
            shown["state"] = self.state_of(process)
            shown["pid"] = None if uptime_s is None else process.pid
            shown["uptime_s"] = _rounded(uptime_s)
        return {**found, "lives": self.lives, "uptime_s": _rounded(self.uptime_s)}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenRuns:
    """What was found in a temporary folder.

    Attributes:
        running: Runs of which something lives, the oldest first.
        left: Folders of this user's runs of which nothing lives.
        strangers: Number of other users' runs.
    """

    running: tuple[SeenRun, ...]
    left: tuple[Path, ...]
    strangers: int


def start_ticks(pid: int) -> int:
    """Return when a process was started, in clock ticks since boot; 0 if it does not live."""
    try:
        # The command name is in parentheses and may hold spaces: fields count from its end.
        stat_fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if stat_fields[0] in (b"Z", b"X") else int(stat_fields[19])


def write_record(folder: Path, record: RunRecord) -> None:
    """Replace the record in a folder, atomically.

    Raises:
        OSError: It cannot be written; the last one is still there.
    """
    new = folder / f"{STATE_FILE}.new"
    new.write_text(record.model_dump_json(), "utf-8")
    new.replace(folder / STATE_FILE)


def find_runs(temp_dir: Path) -> SeenRuns:
    """Return the runs whose folders are in a temporary folder."""
    running: list[SeenRun] = []
    left: list[Path] = []
    strangers = 0
    for folder in sorted(temp_dir.glob(f"{RUN_FOLDER}*")):
        with contextlib.suppress(OSError):
            seen = folder.lstat()
            if not (stat.S_ISDIR(seen.st_mode) and _A_RUN.fullmatch(folder.name)):
                continue
            # What another user wrote may say anything.
            if seen.st_uid != os.geteuid():
                strangers += 1
                continue
            run = _read_run(folder)
            if run and (run.lives or run.process_uptime_s):
                running.append(run)
            elif run:
                left.append(folder)
    running.sort(key=lambda run: (-(run.uptime_s or 0.0), run.record.run_id))
    return SeenRuns(running=tuple(running), left=tuple(left), strangers=strangers)


def _read_run(folder: Path) -> SeenRun | None:
    lives = _is_locked(folder)
    try:
        with (folder / STATE_FILE).open("rb") as file:
            record = RunRecord.model_validate_json(file.read(_MAX_BYTES))
    except (OSError, ValidationError):
        return None
    now_s = float(Path("/proc/uptime").read_text("ascii").split()[0])
    ages = {process.name: _age_s(process, now_s) for process in record.processes}
    return SeenRun(
        record=record,
        lives=lives,
        uptime_s=_age_s(record, now_s) if lives else None,
        process_uptime_s={name: age_s for name, age_s in ages.items() if age_s is not None},
    )


def _age_s(record: RunRecord | ProcessRecord, now_s: float) -> float | None:
    """Return how long a process has lived, at a time since boot; ``None`` if it does not."""
    if not record.pid or start_ticks(record.pid) != record.started_ticks:
        return None
    return max(0.0, now_s - record.started_ticks / os.sysconf("SC_CLK_TCK"))


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


def kept_logs(temp_dir: Path) -> list[Path]:
    """Return the log folders that failed runs have left in a temporary folder, newest first."""
    found: list[tuple[int, Path]] = []
    for folder in temp_dir.glob(f"{RUN_FOLDER}*-logs"):
        with contextlib.suppress(OSError):
            seen = folder.lstat()
            if stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid():
                found.append((seen.st_mtime_ns, folder))
    return [folder for _, folder in sorted(found, reverse=True)]
