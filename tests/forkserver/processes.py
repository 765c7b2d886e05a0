"""Forked processes that look like started ones."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import inspect
import logging
import multiprocessing.context
import multiprocessing.popen_fork
import multiprocessing.util
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ARGUMENT_BYTES = 64 << 10
"""Room for a command line: an argument of that length."""
ENVIRONMENT_BYTES = 96 << 10
"""Room for variables: one of that length, no longer than Linux takes."""
PADDING = "EPD_TEST_PADDING"

_FRESH = ("epd_portable", "tests", "platforms", "runners")
_EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


_of_libraries: set[int] = set()
"""What libraries opened when they were imported."""


def _descriptors() -> set[int]:
    return set(map(int, os.listdir("/proc/self/fd")))


def prepare() -> None:
    """Let processes that are forked from this one fork what they would start."""
    global _of_libraries
    _of_libraries = _descriptors()
    subprocess.Popen = _Popen  # type: ignore[misc]
    multiprocessing.context.SpawnProcess._Popen = staticmethod(  # type: ignore[attr-defined]
        multiprocessing.popen_fork.Popen
    )


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Forks ``python -m MODULE ...`` of this very interpreter; starts everything else."""

    def _execute_child(self, *args: Any) -> None:
        call = _EXECUTE.bind(self, *args).arguments
        argv = call["args"]
        modules = isinstance(argv, list | tuple) and list(argv[:2]) == [sys.executable, "-m"]
        if not modules or call["cwd"] or call["preexec_fn"] or argv[2] not in _FORKED:
            super()._execute_child(*args)  # type: ignore[misc]
            return
        self.pid = os.fork()
        if not self.pid:
            ends = (call[name] for name in ("p2cread", "c2pwrite", "errwrite"))
            become(
                argv,
                dict(os.environ if call["env"] is None else call["env"]),
                [end if end >= 0 else own for own, end in enumerate(ends)],
                new_session=call["start_new_session"],
            )
        self._child_created = True
        self._close_pipe_fds(*(call[name] for name in _PIPES))  # type: ignore[attr-defined]


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_FORKED = (
    "epd_portable.launch.cli",
    "epd_portable.router",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.registry",
)


def become(
    argv: Sequence[str],
    env: Mapping[str, str],
    streams: Sequence[int],
    *,
    new_session: bool = True,
) -> NoReturn:
    """Run ``python -m MODULE ...`` in this process, which was just forked, to its end.

    Args:
        argv: The command.
        env: Its variables.
        streams: Descriptors of its standard input, output and error; all others are closed.
        new_session: Whether it leads a session.
    """
    code = 1
    try:
        if new_session:
            os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number, inheritable=True)
        os.environ.clear()
        os.environ.update(env)
        _show(argv, env)
        _forget()
        for descriptor in _descriptors() - _of_libraries - {0, 1, 2}:
            with contextlib.suppress(OSError):  # That of the listing itself.
                os.close(descriptor)
        sys.argv = [argv[2], *argv[3:]]
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _forget() -> None:
    """Leave to the other process what is its own, and make anew what was made for it."""
    tempfile.tempdir = None
    # What is to be done at its end: else this one would remove its temporary folders.
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    # Ours read their variables when they are imported, and are imported in no time.
    for name in [name for name in sys.modules if name.partition(".")[0] in _FRESH]:
        if name not in (__name__, __package__):
            del sys.modules[name]
    # Sockets in them are closed before their descriptors are, which others may get.
    gc.collect()


def _end(code: int) -> NoReturn:
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _show(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Write command line and variables where Linux reads them for ``/proc``."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    # The third field is the first after the name; proc(5) counts from 1.
    arguments, end_of_arguments, variables, end_of_variables = map(int, fields[45:49])
    for begin, end, texts in (
        (arguments, end_of_arguments, argv),
        (variables, end_of_variables, [f"{name}={value}" for name, value in env.items()]),
    ):
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)
        assert len(data) < end - begin, f"{len(data)} bytes do not fit into {end - begin}"
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, data, len(data))
