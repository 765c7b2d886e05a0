"""Log lines for people and event traces for programs."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import sys
import threading
import time
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from epd_portable import envs
from epd_portable.errors import ConfigError

ROOT = "epd_portable"
STDERR = "stderr"
"""Setting by which lines about requests go to standard error."""


def configure(level: str | None = None) -> None:
    """Send the package's log lines to stderr; the default ``level`` is ``EPD_LOG_LEVEL``."""
    root = logging.getLogger(ROOT)
    root.setLevel(level or envs.EPD_LOG_LEVEL.get())
    if root.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    instance = envs.EPD_INSTANCE.get()
    where = f"{instance} " if instance else ""
    handler.setFormatter(
        _OneLine(f"%(asctime)s %(levelname).1s {where}%(name)s: %(message)s", "%H:%M:%S")
    )
    root.addHandler(handler)
    root.propagate = False


def survive_full_disks() -> None:
    """Let lines be lost while the disk of a log is full, in processes of the launcher.

    Progress bars, which vLLM writes while it loads a model, would end an engine.
    """
    if envs.EPD_INSTANCE.get() and not isinstance(sys.stderr.buffer, _LossyFile):
        sys.stdout, sys.stderr = _LossyFile.text(1), _LossyFile.text(2)


class _LossyFile(io.FileIO):
    """A file whose bytes are lost while its disk is full."""

    @classmethod
    def text(cls, descriptor: int) -> io.TextIOWrapper:
        """Return a text file that writes each line at once."""
        raw: Any = cls(descriptor, "w", closefd=False)
        return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return len(data)


def access_log(where: str) -> logging.Logger:
    """Return what writes lines about requests, as they are.

    Args:
        where: `STDERR`, or the path of a file for this user alone, which is opened again when it
            has been moved.

    Raises:
        ConfigError: The file cannot be written.
    """
    # Of its own: the levels and handlers of others are not for these lines.
    logger = logging.Logger(f"{ROOT}.access")
    handler: logging.StreamHandler[Any] = logging.StreamHandler()
    if where != STDERR:
        try:
            os.close(os.open(where, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
            handler = _LineFile(where, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"front.access_log {where} cannot be written: {error}; name a file in a folder "
                f"that exists, or {STDERR}"
            ) from error
    logger.addHandler(handler)
    return logger


class _LineFile(WatchedFileHandler):
    """Handler that reports a failed write, as on a full disk, at standard error and continues."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _OneLine(logging.Formatter):
    """Keeps a message in its line: a peer's words in it cannot pass for a line of ours."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode()
            for each in super().formatMessage(record)
        )


class EventTrace:
    """Appends events to ``<folder>/<instance>-<pid>.jsonl``; safe from several threads.

    Each line holds ``event``, ``t_s`` (``time.monotonic``), ``pid``, ``instance`` and the event's
    own fields. It is written in one piece, so a killed process leaves only complete lines. A disk
    that is full ends the trace, with a warning, and nothing else.
    """

    def __init__(self, folder: str, instance: str) -> None:
        self._folder = folder
        self._instance = instance
        self._lock = threading.Lock()
        self._file: io.RawIOBase | None = None
        self._pid = 0

    @property
    def on(self) -> bool:
        """Return whether events are recorded."""
        return bool(self._folder)

    def __call__(self, event: str, *, at_s: float | None = None, **fields: object) -> None:
        """Record an event with its fields, if a folder is configured; default of ``at_s``: now."""
        if not self._folder:
            return
        record = {
            "event": event,
            "t_s": time.monotonic() if at_s is None else at_s,
            "pid": os.getpid(),
            "instance": self._instance,
            **fields,
        }
        line = json.dumps(record).encode() + b"\n"
        with self._lock:
            if not self._folder:
                return
            try:
                self._open().write(line)
            except OSError as error:
                logging.getLogger(ROOT).warning(
                    "EPD_TRACE_DIR=%s: %s; this process writes no more events", self._folder, error
                )
                self._folder = ""

    def _open(self) -> io.RawIOBase:
        if self._file is None or self._pid != os.getpid():
            self._pid = os.getpid()
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            name = f"{self._instance or 'process'}-{self._pid}.jsonl"
            # Stays open as long as the process.
            self._file = Path(self._folder, name).open("ab", buffering=0)  # noqa: SIM115
        return self._file


trace = EventTrace(envs.EPD_TRACE_DIR.get(), envs.EPD_INSTANCE.get())
