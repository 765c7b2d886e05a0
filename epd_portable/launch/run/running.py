"""Records of runs: each launcher writes one into the folder of its run, and commands read it.

As long as a launcher lives it keeps its record up to date, and holds the lock on its folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from pathlib import Path

from pydantic import BaseModel, ValidationError, computed_field

RUN_FOLDER = "epd-"
"""Prefix of a run's folder; the id of the run follows."""
STATE_FILE = "run.json"
_A_RUN = re.compile(rf"{RUN_FOLDER}[0-9a-f]{{8}}")
_MAX_BYTES = 4 << 20


class _Started(BaseModel):
    """Start of a process, by ``time.monotonic``: one clock for all processes here."""

    started_s: float | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def uptime_s(self) -> float | None:
        """Seconds since its last start."""
        return None if self.started_s is None else round(time.monotonic() - self.started_s, 1)


class ProcessRecord(_Started):
    """A process of a run.

    Attributes:
        state: ``starting``, ``up``, ``terminating``, or ``waiting`` to be started (again).
        ports: All that it listens on, by purpose.
        log: Path of its log file.
        problem: Its problem with other instances, as the front reports it, or empty.
    """

    name: str
    role: str
    state: str
    url: str
    ports: dict[str, int]
    log: str
    pid: int | None = None
    restarts: int = 0
    problem: str = ""


class RunRecord(_Started):
    """A run, as its launcher records it.

    Attributes:
        phase: ``starting``, ``serving`` or ``stopping``.
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
    started_s: float
    processes: tuple[ProcessRecord, ...]


def write_record(folder: Path, record: RunRecord) -> None:
    """Replace the record in a folder, atomically.

    Raises:
        OSError: It cannot be written; the last one is still there.
    """
    new = folder / f"{STATE_FILE}.new"
    new.write_text(record.model_dump_json(round_trip=True), "utf-8")
    new.replace(folder / STATE_FILE)


def find_runs(temp_dir: Path) -> list[RunRecord]:
    """Return this user's runs, the oldest first, by their folders."""
    found: list[RunRecord] = []
    for folder in temp_dir.glob(f"{RUN_FOLDER}*"):
        with contextlib.suppress(OSError, ValidationError):
            seen = folder.lstat()
            # A file of another user may hold anything.
            ours = stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid()
            if ours and _A_RUN.fullmatch(folder.name) and _is_locked(folder):
                with (folder / STATE_FILE).open("rb") as file:
                    found.append(RunRecord.model_validate_json(file.read(_MAX_BYTES)))
    return sorted(found, key=lambda run: run.started_s)


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
