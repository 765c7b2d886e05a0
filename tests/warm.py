"""Children that need not start: forked from one process which has imported what they need.

A python that imports torch takes two seconds of CPU, and tests start many. What such a child runs
is its own process all the same, with its own arguments, environment and streams. What it does not
show is how libraries are loaded and unloaded: a test of what is imported, or of a process that ends
while it holds what a library gave, starts a python of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, TypeAlias

ROOT = Path(__file__).parents[1]
START_S = 300.0
Ended: TypeAlias = subprocess.CompletedProcess[str]
MAX_REQUEST_BYTES = 1 << 20
PRELOADED = (
    "torch.distributed",
    "epd_portable.launch.plan.processes",
    "epd_portable.platforms.collectives",
    "epd_portable.platforms.cpu",
    "epd_portable.encode.sender",
    "epd_portable.vllm_plugin.exposition",
)
VLLM = ("cv2", "vllm.multimodal.media", "vllm.v1.core.sched.scheduler")
SAME_HASHES = {"PYTHONHASHSEED": "0"}
ROOM = " " * (64 << 10)
"""An argument and a variable of what is forked, in whose place Linux shows those of a child: see
`tests.forked`."""
# Threads do not survive a fork, so that the process may have none.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Child:
    """Part of subprocess.Popen that tests use, for a process that another one started."""

    def __init__(self, pid: int, end: socket.socket, streams: Sequence[IO[str] | None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = streams
        self._end = end

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(1e-6)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._end.settimeout(timeout)
            try:
                said = self._end.recv(16)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("warm child", timeout or 0.0) from None
            assert said, "the process that children are forked from has ended"
            self.returncode = int(said)
            self._end.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # It has ended since.
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that children are forked from.

    Args:
        preload: Modules that it imports; none may start a thread.
        env: Variables beyond those of this process.
    """

    def __init__(self, *preload: str, env: Mapping[str, str] | None = None) -> None:
        variables = {**(env or {}), "EPD_TEST_ROOM": ROOM}
        self._begin(lambda pipe: ["-m", "tests.warm", str(pipe), *preload, ROOM], variables)

    def _begin(
        self, words: Callable[[int], list[str]], env: Mapping[str, str], stdout: int | None = None
    ) -> None:
        """Start it; what it imports is waited for when it is first used.

        Args:
            words: What python is told, by the number of the pipe over which it serves.
            env: Variables beyond those of this process.
            stdout: Its standard output, if not that of this process.
        """
        self._pipe, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *words(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, **ONE_THREAD, **env},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                pass_fds=[theirs.fileno()],
            )
        self._pipe.settimeout(START_S)
        self._starting, self._is_ready = threading.Lock(), False

    def _wait_until_ready(self) -> None:
        with self._starting:
            if not self._is_ready:
                assert self._pipe.recv(16) == b"ready", f"could not be run: {self._process.args}"
                self._is_ready = True

    def close(self) -> None:
        """End it, and the children that have not ended."""
        self._wait_until_ready()
        self._pipe.close()
        self._process.wait(START_S)

    def popen(
        self,
        *words: object,
        stdin: IO[str] | int | None = None,
        stdout: IO[str] | int | None = None,
        stderr: IO[str] | int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Start in the repository what python does with ``-m MODULE ...`` or ``-c CODE ...``.

        Streams are files or PIPE, as with subprocess.Popen, and of text.
        """
        self._wait_until_ready()
        ours: list[IO[str] | None] = []
        theirs: dict[int, int] = {}
        end, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far_end, contextlib.ExitStack() as far:
            for number, stream in enumerate((stdin, stdout, stderr)):
                if stream == subprocess.PIPE:
                    ends = os.pipe()
                    theirs[number] = ends[number > 0]
                    far.callback(os.close, theirs[number])
                    near, mode = ends[number == 0], "r" if number else "w"
                    ours.append(os.fdopen(near, mode, encoding="utf-8"))
                    continue
                ours.append(None)
                if stream is not None:
                    theirs[number] = stream if isinstance(stream, int) else stream.fileno()
            request = {
                "argv": [str(word) for word in words],
                "env": dict(os.environ if env is None else env),
                "streams": list(theirs),
            }
            message = json.dumps(request).encode()
            socket.send_fds(self._pipe, [message], [far_end.fileno(), *theirs.values()])
        end.settimeout(START_S)
        return Child(int(end.recv(16)), end, ours)

    def run(self, *words: object, env: Mapping[str, str] | None = None, timeout: float) -> Ended:
        """Return how it ended and what it wrote; kills it at the timeout."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = self.popen(*words, stdout=out, stderr=err, env=env)
            try:
                child.wait(timeout)
            finally:
                child.kill()
                child.wait(timeout)
            texts = [(file.seek(0), file.read())[1] for file in (out, err)]
        assert child.returncode is not None
        return subprocess.CompletedProcess([*map(str, words)], child.returncode, *texts)


_nurseries: dict[tuple[str, ...], Nursery] = {}


def nursery(*modules: str, env: Mapping[str, str] | None = None) -> Nursery:
    """Return the one that has imported some modules; by default torch, which moves tensors.

    Args:
        modules: What it has imported.
        env: Its variables beyond those of this process, the same for the same modules.
    """
    if modules not in _nurseries:
        _nurseries[modules] = Nursery(*(modules or PRELOADED), env=env)
    return _nurseries[modules]


def over_vllm() -> Nursery:
    """Return one that has imported vLLM, and in which the same names have the same hashes."""
    return nursery(*VLLM, env=SAME_HASHES)


Process: TypeAlias = "Child | subprocess.Popen[str]"


def start(*words: object, cold: bool, **streams: Any) -> Process:
    """Start a child of `nursery`, or where what it imports may not be forked a python of its own.

    A library of a device has threads, and a device belongs to the process that opened it.
    """
    if not cold:
        return nursery().popen(*words, **streams)
    argv = [sys.executable, *map(str, words)]
    return subprocess.Popen(argv, cwd=ROOT, text=True, **streams)


def close() -> None:
    """End all at the end of the run."""
    while _nurseries:
        _nurseries.popitem()[1].close()


def serve(pipe: socket.socket) -> list[str] | None:
    """Fork a child for each request; returns None at the end, and in a child what it is to run.

    An interrupt, which all get at once, is for who asks and for the children: it ends when the pipe
    does, and ends what nobody has ended then.
    """
    # What was imported stays: to look at it again in every child would copy its memory.
    gc.freeze()
    gc.enable()
    running: dict[int, tuple[int, socket.socket]] = {}
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        pipe.send(b"ready")
        while True:
            for key, _ in selector.select():
                if key.fileobj is not pipe:
                    watch = key.fd
                    selector.unregister(watch)
                    reap(watch, *running.pop(watch))
                    continue
                message, fds, _, _ = socket.recv_fds(pipe, MAX_REQUEST_BYTES, 4)
                if not message:
                    for pid, _ in running.values():
                        os.kill(pid, signal.SIGTERM)
                    for watch, (pid, end) in running.items():
                        reap(watch, pid, end)
                    return None
                pid = os.fork()
                end = socket.socket(fileno=fds[0])
                if pid == 0:
                    signal.signal(signal.SIGINT, on_interrupt)
                    for watch, (_, other) in running.items():
                        os.close(watch)
                        other.close()
                    end.close()
                    pipe.close()
                    return become(json.loads(message), fds[1:])
                for fd in fds[1:]:
                    os.close(fd)
                watch = os.pidfd_open(pid)
                running[watch] = (pid, end)
                selector.register(watch, selectors.EVENT_READ)
                end.send(str(pid).encode())


def reap(watch: int, pid: int, end: socket.socket) -> None:
    """Wait for the end of a child, and tell how it was to whoever asked for it."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(watch)
    with end, contextlib.suppress(OSError):
        end.send(str(status).encode())


def become(request: dict[str, list[str] | dict[str, str]], fds: Sequence[int]) -> list[str]:
    """Take on the streams and the environment of a request; returns its words."""
    for stream, fd in zip(request["streams"], fds, strict=True):
        os.dup2(fd, int(stream))
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    # What python takes from its environment at the start.
    tempfile.tempdir = None
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return list(request["argv"])


def main(fd: str, *preload: str) -> None:
    gc.disable()  # Of what imports make little is garbage; to look for it takes a sixth of them.
    for name in preload:
        if name != ROOM:
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, f"one of {preload} starts threads"
    with socket.socket(fileno=int(fd)) as pipe:
        words = serve(pipe)
    if words is not None:
        run_to_end(words)


def run_to_end(words: Sequence[str]) -> NoReturn:
    """Run ``-m MODULE ...`` or ``-c CODE ...`` as python does, and end."""
    kind, what, *arguments = words
    sys.argv = [kind if kind == "-c" else what, *arguments]
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    else:
        status = 0
    # To take apart what was forked costs as much as to import it.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
