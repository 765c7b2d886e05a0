"""Keeps logs within a size, without the processes that write them.

A log that is full is copied aside and cut to nothing where it is. Its writers have it open to
append, so they go on at its new end and notice nothing: no pipe can fill up, break or need somebody
who reads it, and with the launcher dead logs merely grow. What is written between the end of the
copy and the cut, some microseconds, is lost.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

_LOOK_EVERY_S = 0.5
_CHUNK_BYTES = 1 << 20


class Rotation:
    """Looks after some logs in a thread, as a context manager.

    Args:
        logs: The files; those that are not there yet are nobody's fault.
        max_bytes: A log that is larger is cut. Until that is noticed, and while it is copied, more
            may be written.
        files: Kept of each log: itself and ``.1``, ``.2`` and so on, which are older.
        say: Called with a line for the user, from the thread.
    """

    def __init__(
        self, logs: Sequence[Path], *, max_bytes: int, files: int, say: Callable[[str], None]
    ) -> None:
        self._logs = logs
        self._max_bytes = max_bytes
        self._files = files
        self._say = say
        self._told: set[str] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name="epd-logs")

    def __enter__(self) -> Rotation:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End, once a copy that is under way is complete."""
        self._end.set()
        self._thread.join()

    def _look_after(self) -> None:
        while not self._end.wait(_LOOK_EVERY_S):
            for log in self._logs:
                try:
                    rotate(log, max_bytes=self._max_bytes, files=self._files)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._complain(f"what {log} held is dropped: it cannot be kept ({error})")

    def _complain(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._say(line)


def rotate(log: Path, *, max_bytes: int, files: int) -> None:
    """Cut a log that is larger than ``max_bytes``; keep the last of what it held.

    Args:
        log: File that others append to.
        max_bytes: Of the log, and about as much of each older part.
        files: Kept altogether.

    Raises:
        FileNotFoundError: There is no such log.
        OSError: It cannot be copied; it was cut all the same, because its size is what counts.
    """
    descriptor = os.open(log, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if size <= max_bytes:
            return
        try:
            _keep(descriptor, log, begin=max(0, size - max_bytes), end=size + max_bytes, of=files)
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _keep(source: int, log: Path, *, begin: int, end: int, of: int) -> None:
    """Copy a log from ``begin`` to where it ends, but at most ``end``, and forget the oldest."""
    older = [log.with_name(f"{log.name}.{number}") for number in range(1, of)]
    for path in log.parent.glob(f"{log.name}.[0-9]*"):
        if path not in older[:-1]:
            path.unlink()
    for path, older_path in reversed([*itertools.pairwise(older)]):
        if path.exists():
            path.rename(older_path)
    if not older:
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    copy = os.open(older[0], flags, 0o600)
    try:
        os.fchmod(copy, 0o600)
        # It grows meanwhile; the cut follows the first time that nothing more is there.
        while begin < end and (data := os.pread(source, min(_CHUNK_BYTES, end - begin), begin)):
            written = os.write(copy, data)
            begin += written
    except OSError:
        older[0].unlink()
        raise
    finally:
        os.close(copy)
