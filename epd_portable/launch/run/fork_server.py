"""A process from which others are forked: ``python -m … MODULE … ROOM``.

The front and its engines import the same five thousand modules of vLLM: eight seconds of a
core and 450 MB for each of them. The fork server imports once and computes nothing, so it has one
thread, which is all that a fork keeps; those forked from it share its pages until they write to
them. Over its standard input, a socket, the launcher orders processes and hears how they ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

_MAX_ORDER_BYTES = 1 << 20
_ANSWERS_WITHIN_S = 30.0
_MAX_NAME_BYTES = 512
"""By which the environment of one is longer than that of another: it is in two variables."""
_PACKAGE = "epd_portable"
_UNKNOWN_STATUS = 255
"""Of a process that outlived the fork server."""


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    """A process to fork; its log comes beside it.

    Attributes:
        argv: ``python -m MODULE ARGUMENTS``.
        cores: On which it may run.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    cores: list[int]


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """What the fork server says: that it is ready, that a process started, how one ended.

    Attributes:
        pid: 0 when it is ready.
        status: ``None`` of one that has started, whose pidfd comes beside it.
    """

    pid: int = 0
    status: int | None = None


class Forked:
    """What `Child` uses of `subprocess.Popen`, for a process that was forked; has its pidfd."""

    def __init__(self, server: ForkServer, pid: int, watch: int) -> None:
        self.pid = pid
        self._server = server
        self._watch = watch
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; ``None`` while it runs."""
        if self._status is None and select.select([self._watch], [], [], 0)[0]:
            self._status = self._server.status_of(self.pid)
            if self._status is not None:
                os.close(self._watch)
        return self._status


class ForkServer:
    """The launcher's end.

    Args:
        modules: What it imports.
        commands: Of all that it will ever be asked for.

    Attributes:
        pid: Of its process, which leads a session.
    """

    def __init__(
        self,
        modules: Sequence[str],
        commands: Sequence[Sequence[str]],
        *,
        env: Mapping[str, str],
        output: BinaryIO,
    ) -> None:
        self._pipe, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        room = max(len(_shown(command)) for command in commands)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *modules, "-" * room],
                # OpenBLAS starts threads when it is imported.
                env={**env, "OPENBLAS_NUM_THREADS": "1", "ROOM": "-" * _MAX_NAME_BYTES},
                stdin=theirs.fileno(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._pipe.settimeout(_ANSWERS_WITHIN_S)
        self._is_ready = False
        self._statuses: dict[int, int] = {}

    def has_ended(self) -> bool:
        """Return whether nothing can be forked from it any more."""
        return self._process.poll() is not None

    def is_ready(self) -> bool:
        """Return whether it has imported everything."""
        with contextlib.suppress(OSError):
            while not self._is_ready and self._has_said():
                self._hear()
        return self._is_ready and not self.has_ended()

    def fork(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        output: BinaryIO,
    ) -> Forked:
        """Start ``python -m MODULE …`` as the first process of a session of its own.

        It may run on the cores that the caller may.

        Raises:
            OSError: It has ended, or does not answer: then it is killed, or what was ordered would
                start later, beside what the caller starts in its place.
        """
        order = _Order(
            argv=tuple(argv),
            env=dict(env),
            cores=sorted(os.sched_getaffinity(0)),
        )
        try:
            socket.send_fds(self._pipe, [msgspec.json.encode(order)], [output.fileno()])
            while True:
                said, watches = self._hear()
                if watches:
                    return Forked(self, said.pid, watches[0])
        except TimeoutError:
            self._process.kill()
            raise

    def status_of(self, pid: int) -> int | None:
        """Return how a process that has ended did; ``None`` if that is to be heard yet."""
        with contextlib.suppress(OSError):
            while self._has_said():
                self._hear()
        if pid not in self._statuses and self.has_ended():
            return _UNKNOWN_STATUS
        return self._statuses.pop(pid, None)

    def close(self) -> None:
        """Let it end; those forked from it go on."""
        self._pipe.close()
        self._process.wait(_ANSWERS_WITHIN_S)

    def _has_said(self) -> bool:
        return bool(select.select([self._pipe], [], [], 0)[0])

    def _hear(self) -> tuple[_Said, list[int]]:
        message, watches, _, _ = socket.recv_fds(self._pipe, _MAX_ORDER_BYTES, 1)
        if not message:
            self._process.wait(_ANSWERS_WITHIN_S)
            raise ConnectionResetError("the fork server has ended")
        said = msgspec.json.decode(message, type=_Said)
        self._is_ready |= said.pid == 0
        if said.status is not None:
            self._statuses[said.pid] = said.status
        return said, watches


def main() -> None:
    """Import, then fork a process for each order until the launcher is gone."""
    *modules, _ = sys.argv[1:]
    usual = gc.get_threshold()
    for name in modules:
        importlib.import_module(name)
    gc.set_threshold(*usual)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit(f"{', '.join(modules)}: importing them starts threads, which no fork keeps")
    # To look at them again in every process would copy their pages.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as pipe:
        order = _serve(pipe)
    if order is None:
        # To take apart what others share would copy it.
        os._exit(0)
    runpy.run_module(order.argv[2], run_name="__main__", alter_sys=True)


def _serve(pipe: socket.socket) -> _Order | None:
    """Fork a process for each order; return it there, and ``None`` here in the end."""
    running: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        pipe.send(msgspec.json.encode(_Said()))
        while True:
            for key, _ in selector.select():
                if key.fd in running:
                    selector.unregister(key.fd)
                    pid = running.pop(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    os.close(key.fd)
                    pipe.send(msgspec.json.encode(_Said(pid=pid, status=status)))
                    continue
                message, logs, _, _ = socket.recv_fds(pipe, _MAX_ORDER_BYTES, 1)
                if not message:
                    return None
                pid = os.fork()
                if not pid:
                    for watch in running:
                        os.close(watch)
                    return _become(msgspec.json.decode(message, type=_Order), *logs)
                os.close(logs[0])
                watch = os.pidfd_open(pid)
                running[watch] = pid
                selector.register(watch, selectors.EVENT_READ)
                socket.send_fds(pipe, [msgspec.json.encode(_Said(pid=pid))], [watch])


def _become(order: _Order, log: int) -> _Order:
    """Turn this process into the one that the order's command would have started."""
    os.setsid()
    os.sched_setaffinity(0, order.cores)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, log, log)):
        os.dup2(descriptor, number)
    os.close(nothing)
    os.close(log)
    os.environ.clear()
    os.environ.update(order.env)
    # Ours read their variables when they are imported.
    for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
        del sys.modules[name]
    sys.argv = [*order.argv[2:]]
    show(order.argv, order.env)
    return order


def _shown(texts: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(text) + b"\0" for text in texts)


def show(argv: Iterable[str], env: Mapping[str, str]) -> None:
    """Write command line and environment where Linux reads them for ``/proc``, in place of ours.

    What is longer than ours is cut off.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    # proc(5) counts from 1; the third field is the first after the name.
    places = map(int, fields[45:49])
    for texts in argv, [f"{name}={value}" for name, value in env.items()]:
        begin, end = next(places), next(places)
        data = _shown(texts)[: end - begin]
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, data, len(data))


if __name__ == "__main__":
    main()
