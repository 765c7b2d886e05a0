"""Processes of a run: the start of one, its health, and its restarts in the order of the code.

While the topology starts, the first death ends it. While it serves, a death is followed by a
restart after a pause that doubles up to a limit. A process that lives and is silent for too long
gets SIGTERM, then SIGKILL: a death too.

Instances on one device start one at a time: an engine measures the device's free memory while it
starts, and takes what another one takes or frees meanwhile for its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx

from epd_portable import envs
from epd_portable.config.folders import cache_folder
from epd_portable.config.schema import Launch
from epd_portable.errors import LaunchError
from epd_portable.launch.environment import child_environ
from epd_portable.launch.notices import Event, Notice
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

    Raises:
        LaunchError: The program cannot be started.

    Attributes:
        session: Id of the session that holds the process and its children.
        started_s: ``time.monotonic`` at its start, the same clock for all processes of a machine.
        mapped: Files of shared memory that its processes were seen to map.
    """

    def __init__(self, spec: ProcessSpec, *, log_dir: Path, run_id: str) -> None:
        self.spec = spec
        self.log = log_dir / f"{spec.name}.log"
        self.mapped: set[Path] = set()
        if spec.shm_name:
            # If another user's file has that name, the instance reports it.
            with contextlib.suppress(OSError):
                (sessions.SHM / spec.shm_name).unlink(missing_ok=True)
        with open_log(self.log) as output, on_cores({core for rank in spec.cores for core in rank}):
            self._log_begin = output.tell()
            try:
                self._process = subprocess.Popen(
                    spec.argv,
                    env=_environment(spec.env, run_id),
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
        names = {each.value: each.name for each in signal.Signals}
        how = f"was killed by {names.get(-status, f'signal {-status}')}"
        return (f"exited with status {status}" if status >= 0 else how) + self.last_words()


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


def _environment(mine: Mapping[str, str], run_id: str) -> dict[str, str]:
    """Lay a process's own variables over the launcher's.

    Kernels that torch compiles go into a folder that outlives the run. Folders of metrics are left
    out: every engine on the host would show what all of them count.
    """
    return child_environ(
        {
            "TORCHINDUCTOR_CACHE_DIR": str(cache_folder(os.environ) / "torchinductor"),
            **{name: value for name, value in os.environ.items() if name not in _OF_ONE_ENGINE},
            **mine,
            "EPD_RUN_ID": run_id,
            "PYTHONUNBUFFERED": "1",
        }
    )


FORGIVEN_AFTER_S = 60.0
"""Healthy for this long, a process has its earlier deaths forgiven."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Before a process that died while the topology serves is started again; doubles every time."""
PROBE_EVERY_S = 5.0
PROBES = 24
"""At least so many within ``launch.hung_after_s``."""
HUNG_PROBES = 3
"""Probes in a row that a process must miss before it counts as hung, however long each took."""
STEP_S = 0.1
_START_PROBE_EVERY_S = 0.5
_START_PROBE_TIMEOUT_S = 1.0


class Lifecycle:
    """Keeper of one process: starts it, watches it, and starts it again when it has ended.

    Args:
        everyone: All processes of the run, by their names.
        start: Starts it.
        clean_up: Ends what a process that has ended left running.

    Attributes:
        state: For the user. ``waiting`` to be started (again).
        child: The process; ``None`` while there is none.
        starts: How many there were.
        serving: Whether the topology serves, and a death is followed by a restart.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        launch: Launch,
        everyone: Mapping[str, Lifecycle],
        *,
        start: Callable[[ProcessSpec], Child],
        clean_up: Callable[[Child], Awaitable[None]],
        say: Callable[[Notice], None],
    ) -> None:
        self.spec = spec
        self.state: Literal["waiting", "starting", "up", "terminating"] = "waiting"
        self.child: Child | None = None
        self.starts = 0
        self.serving = False
        self._healthy_at: float | None = None
        self._silent_since: float | None = None
        self._launch = launch
        self._everyone = everyone
        self._start = start
        self._clean_up = clean_up
        self._say = say

    def blocking(self) -> list[str]:
        """Return the neighbours whose start or end this one must wait for.

        The memory that a neighbour takes of a device changes on its way up or down. Before the
        topology serves they start in their order.
        """
        found = []
        for other in self._everyone.values():
            is_earlier = other.spec.name in self.spec.after
            changes = other.state in ("starting", "terminating")
            is_due = is_earlier and not self.serving and other.state != "up"
            if is_due or (changes and (is_earlier or self.spec.name in other.spec.after)):
                found.append(other.spec.name)
        return found

    async def keep(self) -> None:
        """Start the process, and again whenever it has ended; never returns.

        Raises:
            LaunchError: It has ended, or was not healthy in time, before the topology serves.
        """
        name, deaths = self.spec.name, 0
        while True:
            while self.blocking():
                await asyncio.sleep(STEP_S)
            self.state = "starting"
            how, healthy_s = await self._run_once()
            self.state = "waiting"
            if not self.serving:
                raise LaunchError(f"{name} {how}")
            if healthy_s >= FORGIVEN_AFTER_S:
                deaths = 0
            delay_s = min(FIRST_PAUSE_S * 2.0 ** min(deaths, 63), LONGEST_PAUSE_S)
            deaths += 1
            fields = {"instance": name, "reason": how, "restart_in_s": delay_s}
            self._say(Notice("exited", f"{name} {how}; restarting it in {delay_s:g} s", fields))
            await asyncio.sleep(delay_s)

    async def _run_once(self) -> tuple[str, float]:
        """Return how a process has ended, as in ``was killed by SIGKILL``; how long it was well."""
        self._healthy_at = self._silent_since = None
        try:
            child = self.child = self._start(self.spec)
        except LaunchError as error:
            # A death: there may be memory, disk space or its program again a little later.
            return f"was not started: {error}", 0.0
        self.starts += 1
        watch = asyncio.create_task(self._watch(child))
        try:
            while child.exit_status() is None:
                if watch.done():
                    watch.result()
                await asyncio.sleep(STEP_S)
        finally:
            watch.cancel()
        self.state = "terminating"
        how = child.ending()
        until = _now() if self._silent_since is None else self._silent_since
        healthy_s = 0.0 if self._healthy_at is None else until - self._healthy_at
        await self._clean_up(child)
        self.child = None
        return how, healthy_s

    async def _watch(self, child: Child) -> None:
        """Wait until a process is healthy, and end one that is silent for too long."""
        name, limit_s = self.spec.name, self._launch.startup_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while not await child.is_ready(timeout_s=_START_PROBE_TIMEOUT_S):
                    await asyncio.sleep(_START_PROBE_EVERY_S)
        except TimeoutError as error:
            reason = f"is not healthy {limit_s:g} s after its start"
            if not self.serving:
                words = child.last_words()
                text = f"{name} {reason} (launch.startup_timeout_s){words}"
                raise LaunchError(text) from error
            self._end(child, "killing", reason, signal.SIGKILL)
            return
        child.note_shared_memory()  # It may be killed before the next time.
        self.state, self._healthy_at = "up", _now()
        if self.serving:
            self._say(Notice("recovered", f"{name} has recovered", {"instance": name}))
        if not self._launch.hung_after_s:
            return
        silent_s = await self._silence(child)
        self.state = "terminating"
        reason = f"has not responded as it should for {silent_s:.0f} s (launch.hung_after_s)"
        self._end(child, "terminating", reason, signal.SIGTERM)
        await asyncio.sleep(self._launch.stop_grace_s)
        reason = f"does not end within {self._launch.stop_grace_s:g} s"
        self._end(child, "killing", reason, signal.SIGKILL)

    async def _silence(self, child: Child) -> float:
        """Return for how long a process has been silent, once that is too long."""
        limit_s, missed = self._launch.hung_after_s, 0
        while True:
            begun = _now()
            if await child.is_well(timeout_s=limit_s / HUNG_PROBES):
                self._silent_since, missed = None, 0
            else:
                missed += 1
                if self._silent_since is None:
                    self._silent_since = begun
                silent_s = _now() - self._silent_since
                if missed >= HUNG_PROBES and silent_s >= limit_s:
                    return silent_s
            due = begun + min(PROBE_EVERY_S, limit_s / PROBES)
            await asyncio.sleep(max(0.0, due - _now()))

    def _end(self, child: Child, event: Event, reason: str, signum: signal.Signals) -> None:
        name = self.spec.name
        fields = {"instance": name, "reason": reason}
        self._say(Notice(event, f"{name} {reason}; {event} it", fields))
        child.send_signal(signum)


def _now() -> float:
    return asyncio.get_running_loop().time()
