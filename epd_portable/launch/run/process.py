"""Starting one process of a plan, and asking how it is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from epd_portable import envs
from epd_portable.config.folders import cache_folder
from epd_portable.errors import LaunchError
from epd_portable.launch.environment import child_environ
from epd_portable.launch.plan.processes import ProcessSpec
from epd_portable.launch.run.front_client import trusting
from epd_portable.launch.run.log_files import open_log
from epd_portable.launch.run.sessions import SHM, members

_TAIL_BYTES = 256 << 10
_OF_ONE_ENGINE = ("PROMETHEUS_MULTIPROC_DIR", envs.EPD_METRICS_DIR.name)
_PROBE_THREADS = 64
"""So many silent processes at a time; while there are more, some are probed less often."""


class Child:
    """One started process: the first of its own session, writing to its own log file.

    Args:
        log_dir: Folder of its log ``<name>.log``, to which every start appends.
        run_id: Marks the process and its children as part of a run.
        environ: Environment that ``spec.env`` is laid over.

    Raises:
        LaunchError: The program cannot be started.

    Attributes:
        session: Id of the session that holds the process and its children.
        started_s: ``time.monotonic`` at its start, the same clock for all processes of a machine.
        mapped: Files of shared memory that its processes were seen to map.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        log_dir: Path,
        run_id: str,
        environ: Mapping[str, str],
    ) -> None:
        self.spec = spec
        self.log = log_dir / f"{spec.name}.log"
        self.mapped: set[Path] = set()
        self._cores = {core for rank in spec.cores for core in rank}
        if spec.shm_name:
            # If another user's file has that name, the instance says so.
            with contextlib.suppress(OSError):
                (SHM / spec.shm_name).unlink(missing_ok=True)
        with open_log(self.log) as output, on_cores(self._cores):
            self._log_start = output.tell()
            env = _environment(environ, spec.env, run_id)
            try:
                self._process = subprocess.Popen(
                    spec.argv,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchError(f"cannot start {spec.argv[0]}: {error}") from error
        self.session = self._process.pid
        self.started_s = time.monotonic()

    def spread_api_server(self) -> None:
        """Let API servers run on their further cores too; an instance's engines keep theirs."""
        if self.spec.api_cores:
            alone = self.spec.role != "front"
            pids = [self.session] if alone else members({self.session}, None)
            for pid in pids:
                bind_threads(pid, self._cores.union(self.spec.api_cores))

    def exit_status(self) -> int | None:
        """Return the exit status, negative for a signal, or ``None`` while it runs."""
        return self._process.poll()

    def is_ready(self, *, timeout_s: float) -> bool:
        """Return whether ``GET /health`` answers 200 in time."""
        return self._health(timeout_s) == HTTPStatus.OK

    def is_well(self, *, timeout_s: float) -> bool:
        """Return whether a process that was ready still answers ``GET /health`` as it should.

        An instance answers 200. A front that has no instance to use answers 503, and is well. For
        an engine its front answers, and 503 if the engine does not respond to it.
        """
        if urlsplit(self.spec.url).path:
            # Silence says nothing of the engine: the front must have the time to speak of it.
            status = self._health(timeout_s, f"?within_s={timeout_s / 2:g}")
            return status != HTTPStatus.SERVICE_UNAVAILABLE
        status = self._health(timeout_s)
        return status is not None if self.spec.role == "front" else status == HTTPStatus.OK

    def _health(self, timeout_s: float, query: str = "") -> int | None:
        """Return the status of ``GET /health``; ``None`` without an answer in time."""
        cert_file = self.spec.tls_cert_file
        try:
            return httpx.get(
                f"{self.spec.url}/health{query}",
                timeout=timeout_s,
                trust_env=False,
                # Read each time: it may be renewed. Without one it is plain HTTP.
                verify=trusting(cert_file) if cert_file else False,
            ).status_code
        except (httpx.HTTPError, OSError):
            return None

    def output(self) -> str:
        """Return the end of what this start has written so far, at most 256 KiB.

        Nothing if the log has been removed.
        """
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            # Truncated meanwhile: all that is in it is of this start.
            self._log_start = self._log_start if self._log_start <= end else 0
            file.seek(max(self._log_start, end - _TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
        return ""


def bind_threads(pid: int, cores: Collection[int]) -> None:
    """Let the threads of a process run on these cores, and those that they start."""
    # Threads and the process may end meanwhile.
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), cores)


@contextlib.contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Let what is started meanwhile, and all that it starts in turn, run on these cores only.

    Before the first import: libraries count the cores that they may use when they are loaded.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _environment(
    environ: Mapping[str, str], mine: Mapping[str, str], run_id: str
) -> dict[str, str]:
    """Lay a process's own variables over the launcher's.

    Kernels that torch compiles go into a folder that outlives the run. Folders of metrics are left
    out: every engine on the host would show what all of them count.
    """
    return child_environ(
        {
            "TORCHINDUCTOR_CACHE_DIR": str(cache_folder(environ) / "torchinductor"),
            **{name: value for name, value in environ.items() if name not in _OF_ONE_ENGINE},
            **mine,
            "EPD_RUN_ID": run_id,
            "PYTHONUNBUFFERED": "1",
        }
    )


def describe_exit(status: int) -> str:
    """Say how a process ended, by its `Child.exit_status`."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


Probe = tuple[Child, float, bool]
"""A process, when it was asked (``time.monotonic``), and whether its answer was yes."""


class Probes:
    """Questions to processes, in threads, one at a time for each process."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_PROBE_THREADS, thread_name_prefix="epd-probe")
        self._under_way: dict[Child, Future[Probe]] = {}

    def ask(self, child: Child, question: Callable[[Child], bool]) -> None:
        """Ask a question of a process, unless it has not answered the last one yet."""

        def probe() -> Probe:
            return child, time.monotonic(), question(child)

        if child not in self._under_way:
            self._under_way[child] = self._threads.submit(probe)

    def answered(self) -> list[Probe]:
        """Return the probes that have ended; each is returned once."""
        children = [child for child, future in self._under_way.items() if future.done()]
        return [self._under_way.pop(child).result() for child in children]

    def close(self) -> None:
        """Ask nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
