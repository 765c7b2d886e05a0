"""Engines for tests, forked from a process that has imported vLLM: ``-m tests.forked MODULE ...``.

Every process of vLLM imports for ten seconds of a core before it does anything, and tests start
dozens. A `warm.Nursery` imports once and never computes. The launcher is forked from it, and the
launcher's fronts and API servers, their engine processes and workers are forked from one another
and run what they would have run. To everybody else they look like processes that were started:
parents, sessions, signals, exit statuses, and under ``/proc`` command lines and environments are
those of the real ones.

Not reproduced: variables that libraries read when they are imported (`BASE` sets those that
matter), what vLLM preloads into processes that it spawns (tcmalloc), kernels that OpenMP binds to
cores, and how long vLLM's workers poll (`POLLING_S`). The demo is started as users start it, and
so are the front and one encode engine of ``tests/e2e/front/test_front.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import logging
import multiprocessing.context
import multiprocessing.popen_fork
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from tests import pod, warm

BASE = {
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    **warm.ONE_THREAD,
}
"""Read by libraries when they are imported. One thread each: no pool of them is lost by a fork."""

Popen = Callable[..., Any]
"""`subprocess.Popen`, or what `popen_of` gives."""


def nursery(*modules: str, env: Mapping[str, str] | None = None) -> warm.Nursery:
    """Return a process that has imported modules of engines, with variables beyond `BASE`."""
    return warm.Nursery(*modules, __name__, env={**BASE, **(env or {})})


def popen_of(nursery: warm.Nursery) -> Popen:
    """Return what starts processes by forking, with as many arguments as `servers.Server` gives."""

    def popen(
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: IO[bytes],
        stderr: int,
        start_new_session: bool,
    ) -> warm.Child:
        assert list(argv[:2]) == [sys.executable, "-m"]
        assert (stdin, stderr, start_new_session) == (subprocess.DEVNULL, subprocess.STDOUT, True)
        output = stdout.fileno()
        words = ("-m", __name__, *argv[2:])
        return nursery.popen(*words, stdout=output, stderr=output, env={**BASE, **env})

    return popen


SHM_BROADCAST = "vllm.distributed.device_communicators.shm_broadcast"
POLLING_S = 0.02
"""Seconds for which vLLM's workers poll for a step before they wait: one by default."""
COLD = "EPD_TEST_COLD"
"""Names the instances, or the front, that are started and not forked."""
POD = "EPD_TEST_POD"
"""Names a folder: the command runs in a container, see `pod.join`."""
_FRESH = ("epd_portable", "tests", "platforms", "runners")
"""Ours: they read their variables when they are imported, and are imported in no time."""
_FORKED = (
    "epd_portable.engine.core",
    "epd_portable.engine.remote",
    "epd_portable.front.server",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.registry",
    "tests.faults.small.engine",
)
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_EXECUTE = inspect.signature(subprocess.Popen._execute_child)

_of_libraries: set[int] = set()
"""Descriptors that libraries opened when they were imported."""


def lead(argv: Sequence[str]) -> NoReturn:
    """Be the first process: what it starts, and they start, is forked from it.

    Args:
        argv: The module that it runs, and its arguments.
    """
    _of_libraries.update(_descriptors())
    importlib.import_module(SHM_BROADCAST).SpinCondition.record_read = _record_read
    subprocess.Popen = _Popen
    multiprocessing.context.SpawnProcess._Popen = staticmethod(_fork)
    command, env = [sys.executable, "-m", *argv], dict(os.environ)
    if folder := env.pop(POD, ""):
        pod.join(Path(folder))
        env = {name: value for name, value in env.items() if name not in pod.UNSET}
    _become(command, env, (0, 1, 2), new_session=True)


def _record_read(reader: Any) -> None:
    """Poll for less long after a message than before the first, which may come unannounced."""
    reader.last_read = time.monotonic() - reader.busy_loop_s + POLLING_S


def _fork(process: Any) -> multiprocessing.popen_fork.Popen:
    """Fork what would have been spawned."""
    # Spawning starts the tracker first, in the parent: there it outlives a child that is killed
    # with all that it has started, and removes the shared memory that they leave.
    multiprocessing.resource_tracker.ensure_running()
    return multiprocessing.popen_fork.Popen(process)


class _Popen(subprocess.Popen):
    """Forks ``python -m MODULE ...`` for modules that need what is imported; starts all else."""

    def _execute_child(self, *args: Any) -> None:
        call = _EXECUTE.bind(self, *args).arguments
        argv = call["args"]
        env = os.environ if call["env"] is None else call["env"]
        module = isinstance(argv, list | tuple) and list(argv[:2]) == [sys.executable, "-m"]
        is_cold = env.get("EPD_INSTANCE") in env.get(COLD, "").split()
        if not module or argv[2] not in _FORKED or is_cold:
            super()._execute_child(*args)
            return
        assert not (call["cwd"] or call["preexec_fn"] or call["pass_fds"])
        self.pid = os.fork()
        if not self.pid:
            ends = (call[name] for name in ("p2cread", "c2pwrite", "errwrite"))
            _become(
                argv,
                dict(env),
                [end if end >= 0 else own for own, end in enumerate(ends)],
                new_session=call["start_new_session"],
            )
        self._child_created = True
        self._close_pipe_fds(*(call[name] for name in _PIPES))


def _become(
    argv: Sequence[str], env: Mapping[str, str], streams: Sequence[int], *, new_session: bool
) -> NoReturn:
    """Turn this process, which was just forked, into the one that a command would have started.

    Args:
        argv: The command.
        env: Its variables.
        streams: Descriptors of its standard input, output and error; all others are closed.
        new_session: Whether it leads a session.
    """
    if new_session:
        os.setsid()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number, inheritable=True)
    os.environ.clear()
    os.environ.update(env)
    show(argv, env)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # Of the process that it was forked from.
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)
    _forget()
    for descriptor in _descriptors() - _of_libraries - {0, 1, 2}:
        with contextlib.suppress(OSError):  # That of the listing itself.
            os.close(descriptor)
    warm.run_to_end(argv[1:])


def show(argv: Iterable[str], env: Mapping[str, str]) -> None:
    """Write command line and environment where Linux reads them for ``/proc``, in place of ours.

    What is longer than ours is cut off.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    # proc(5) counts from 1; the third field is the first after the name.
    places = map(int, fields[45:49])
    for texts in argv, [f"{name}={value}" for name, value in env.items()]:
        begin, end = next(places), next(places)
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - begin]
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, data, len(data))


def _descriptors() -> set[int]:
    return set(map(int, os.listdir("/proc/self/fd")))


def _forget() -> None:
    """Leave to the process that was forked what is its own, and make anew what was made for it."""
    tempfile.tempdir = None
    # What is to be done at its end: else this one would remove its temporary folders.
    atexit._clear()
    weakref.finalize._registry.clear()
    weakref.finalize._registered_with_atexit = False
    multiprocessing.util._finalizer_registry.clear()
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)
    for name in [name for name in sys.modules if name.partition(".")[0] in _FRESH]:
        if name not in (__name__, __package__, pod.__name__, warm.__name__):
            del sys.modules[name]
    # Sockets in them are closed before their descriptors are, which others may get.
    gc.collect()


if __name__ == "__main__":
    # The one that was imported, not its copy that runs as the main module.
    from tests import forked

    forked.lead(sys.argv[1:])
