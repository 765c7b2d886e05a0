"""Logs of processes: files that only their user can read, their ends, and the lines to quote.

Logs show what requests hold. Writers have a log open to
append, so that others may truncate it while they write, as ``logrotate`` does (``copytruncate``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from epd_portable.errors import ConfigError, LaunchError
from epd_portable.launch.notices import Notice

_TAIL_BYTES = 256 << 10

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# "(EngineCore pid=12) ERROR 01-31 12:00:00 [core.py:99] " before the text of a vLLM line.
_VLLM_PREFIX = re.compile(
    r"^(\([^)]*pid=\d+\)\s*)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\]\s?)?"
)
_QUIET = re.compile(r"^(\([^)]*pid=\d+\)\s*)?(INFO|DEBUG)\b|^[\d:]+ [ID] ")
_EXCEPTION = re.compile(
    r"^([\w.]+\.)?\w*(Error|Exception|Exit|Interrupt|Timeout)(: |$)|^Fatal Python error: "
)
_USAGE = re.compile(r"^\S+: error: ")
_SECOND_HAND = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError|"
    r"See (the )?root cause|^(asyncio\.\S+\.)?CancelledError"
)
_HEADLINE_ONLY = re.compile(r"validation errors? for")
_LONGEST = 300
_LONGEST_STAGE = 80
_FIRST_REPORT_S, _REPORT_EVERY_S = 2.0, 30.0


def make_private_folder(path: Path) -> None:
    """Make a new folder of mode 700, regardless of the umask.

    Raises:
        FileExistsError: There is something of that name, perhaps not ours.
    """
    path.mkdir(mode=0o700)
    path.chmod(0o700)


def use_log_folder(path: Path) -> None:
    """Make a folder for logs, or take one that is there; logs are private by their own modes.

    One of another user is refused, who could replace logs.

    Raises:
        ConfigError: It cannot be made or used. The message names the remedy.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            make_private_folder(path)
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"log folder {path} cannot be used: {error}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"log folder {path} is no folder: name another")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"log folder {path} belongs to user {found.st_uid}, who could replace logs: name one "
            "of your own"
        )


def open_log(path: Path) -> BinaryIO:
    """Open a log, a new one or one of an earlier run, to append to it.

    Raises:
        LaunchError: It cannot be opened, or is a link or another user's.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.fdopen(os.open(path, flags, 0o600), "ab")
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            file.close()
            raise PermissionError("it belongs to another user")
        os.fchmod(file.fileno(), 0o600)
    except OSError as error:
        raise LaunchError(f"log {path} cannot be written: {error}") from error
    return file


def text_behind(path: Path, place: int) -> str:
    """Return what a log has behind so many bytes, at most the last 256 KiB of it.

    Others append to it and truncate it: then all that is in it is new. It may not exist.
    """
    if not path.exists():
        return ""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(place if place <= size else 0, size - _TAIL_BYTES))
        return file.read(_TAIL_BYTES).decode("utf-8", "replace")


def latest_line(output: str) -> str:
    """Return the last line of what a process has written, without vLLM's prefix."""
    lines = (_VLLM_PREFIX.sub("", _ANSI.sub("", line)).strip() for line in output.splitlines())
    return next((_shorten(line, _LONGEST_STAGE) for line in [*lines][::-1] if line), "importing")


def failure_line(output: str, *, guess: bool = True) -> str:
    """Return the one line that explains best why a process failed, or nothing.

    That is the last exception that does not merely report another process's; failing that, the
    last exception of any kind; failing that, for a guess, the last line above level INFO.
    """
    raw = [line for line in output.splitlines() if not _QUIET.match(line)]
    plain = (_VLLM_PREFIX.sub("", _ANSI.sub("", line)).rstrip() for line in raw)
    lines = [line for line in plain if line.strip()]
    causes = [i for i, line in enumerate(lines) if _EXCEPTION.match(line) or _USAGE.match(line)]
    first_hand = [i for i in causes if not _SECOND_HAND.search(lines[i])]
    chosen = first_hand or causes
    if not chosen:
        return _shorten(lines[-1]) if lines and guess else ""
    position = chosen[-1]
    text = lines[position].strip()
    # pydantic writes what is wrong on the lines after its headline.
    if _HEADLINE_ONLY.search(text):
        details = itertools.takewhile(
            lambda line: not line.startswith("For further information"),
            (line.strip() for line in lines[position + 1 :]),
        )
        text = " ".join([text, *details])
    return _shorten(text)


def _shorten(text: str, longest: int = _LONGEST) -> str:
    text = text.strip()
    return text if len(text) <= longest else text[: longest - 3] + "..."


class Progress:
    """Reports what a start waits for: after 2 s, 4 s, 8 s and so on, then every 30 s.

    Args:
        started_at: Time of the start, as all times here in seconds of one clock.
    """

    def __init__(self, *, started_at: float) -> None:
        self._started_at = started_at
        self._next_at = started_at + _FIRST_REPORT_S

    def notices(self, stages: Mapping[str, str], now: float) -> list[Notice]:
        """Return what to show, by what each process does that is not ready."""
        if now < self._next_at or not stages:
            return []
        elapsed_s = now - self._started_at
        self._next_at = now + min(elapsed_s, _REPORT_EVERY_S)
        waiting = ", ".join(f"{name} ({stage})" for name, stage in stages.items())
        text = f"{elapsed_s:3.0f} s  still waiting for {waiting}"
        return [Notice("waiting", text, {"stages": {**stages}, "elapsed_s": round(elapsed_s, 1)})]
