"""Starting one process of a plan, and asking how it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from epd_portable import envs
from epd_portable.config.folders import cache_folder
from epd_portable.errors import LaunchError
from epd_portable.launch.environment import child_environ
from epd_portable.launch.plan.processes import ProcessSpec
from epd_portable.launch.run import sessions
from epd_portable.launch.run.fronts import trusting
from epd_portable.launch.run.logs import failure_line, open_log, text_behind

_OF_ONE_ENGINE = ("PROMETHEUS_MULTIPROC_DIR", envs.EPD_METRICS_DIR.name)


class Child:
    """A started process: the first of its own session, writing to its own log file.

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
        if spec.shm_name:
            # If another user's file has that name, the instance reports it.
            with contextlib.suppress(OSError):
                (sessions.SHM / spec.shm_name).unlink(missing_ok=True)
        with open_log(self.log) as output, on_cores({core for rank in spec.cores for core in rank}):
            self._log_begin = output.tell()
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

    def exit_status(self) -> int | None:
        """Return the exit status, negative for a signal, or ``None`` while it runs."""
        return self._process.poll()

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the process, which may be gone already."""
        sessions.send_signal(self.session, signum)

    def note_shared_memory(self) -> None:
        """Note what its processes map, in case they are killed before they remove it."""
        self.mapped |= sessions.mapped_files(sessions.members([self.session], None))

    async def is_ready(self, *, timeout_s: float) -> bool:
        """Return whether ``GET /health`` returns 200 in time."""
        return await self._health(timeout_s) == HTTPStatus.OK

    async def is_well(self, *, timeout_s: float) -> bool:
        """Return whether a process that was ready still responds to ``GET /health`` as it should.

        A front that has no instance to use returns 503, and is well. For an engine its front
        responds, with 503 if the engine does not respond to it. A silent front is no sign of that.
        """
        if urlsplit(self.spec.url).path:
            status = await self._health(timeout_s, f"?within_s={timeout_s / 2:g}")
            return status != HTTPStatus.SERVICE_UNAVAILABLE
        status = await self._health(timeout_s)
        return status is not None if self.spec.role == "front" else status == HTTPStatus.OK

    async def _health(self, timeout_s: float, query: str = "") -> int | None:
        """Return the status of ``GET /health``; ``None`` without a response in time."""
        url, cert_file = f"{self.spec.url}/health{query}", self.spec.tls_cert_file
        try:
            # Read each time: it may be renewed. Without one it is plain HTTP.
            verify = trusting(cert_file) if cert_file else False
            async with (
                asyncio.timeout(timeout_s),
                httpx.AsyncClient(timeout=None, trust_env=False, verify=verify) as client,
            ):
                return (await client.get(url)).status_code
        except (httpx.HTTPError, OSError):  # A TimeoutError is an OSError.
            return None

    def output(self) -> str:
        """Return the end of what this start has written so far, at most 256 KiB."""
        return text_behind(self.log, self._log_begin)

    def last_words(self) -> str:
        """Return the line of its log that explains best why it does not run, and the log's path."""
        status = self.exit_status()
        # The last line of a process that was killed has nothing to do with its end.
        words = failure_line(self.output(), guess=status is None or status >= 0)
        return f"{words and f': {words}'} (log: {self.log})"

    def ending(self) -> str:
        """Return how it has ended, with its last words."""
        status = self.exit_status()
        assert status is not None
        return describe_exit(status) + self.last_words()


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
    """Describe how a process ended, by its `Child.exit_status`."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
