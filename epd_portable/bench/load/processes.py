"""Processes beside what is measured: on given cores, and asked by lines."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

import epd_portable
from epd_portable.errors import MeasurementError

_OWN_PATH = str(Path(epd_portable.__file__).resolve().parents[1])

T = TypeVar("T")


def pinned(cores: frozenset[int], folder: str) -> Callable[..., subprocess.Popen[bytes]]:
    """Return a `subprocess.Popen` whose process starts on these cores and in this folder.

    In a folder of its own: Python takes modules from where it is started before all others.
    """

    def start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        try:
            return subprocess.Popen(argv, cwd=folder, **options)
        finally:
            os.sched_setaffinity(0, before)

    return start


class LineProcess:
    """A process that reads lines and answers each with a line, as a context manager.

    Args:
        module: Module that is run.
        cores: Where it runs.
        folder: Working directory, which gets its standard error.
    """

    def __init__(self, module: str, cores: frozenset[int], folder: Path) -> None:
        self._module = module
        self._start = pinned(cores, str(folder))
        self._log = folder / f"{module}.log"

    def __enter__(self) -> LineProcess:
        """Start it."""
        with self._log.open("ab") as errors:
            self._process = self._start(
                [sys.executable, "-m", self._module],
                env={**os.environ, "PYTHONPATH": _OWN_PATH},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def tell(self, line: bytes) -> None:
        """Send a line; `hear` has the answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `hear` says why.
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def hear(self, kind: type[T]) -> T:
        """Return the next answer.

        Raises:
            MeasurementError: The process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace").splitlines()[-15:]
            raise MeasurementError("\n".join([f"{self._module} has ended:", *tail]))
        return msgspec.json.decode(line, type=kind)
