"""Runs a plan: start, serve, stop. Decisions are ``lifecycle``'s; this is the shell around them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType

from epd_portable.config.schema import Launch
from epd_portable.config.secret import Secret
from epd_portable.errors import LaunchError, RefusedError
from epd_portable.launch.notices import Notice
from epd_portable.launch.plan.processes import Plan
from epd_portable.launch.plan.text import columns, ports_text
from epd_portable.launch.run import sessions
from epd_portable.launch.run.fronts import Registrar
from epd_portable.launch.run.guard import Guard
from epd_portable.launch.run.lifecycle import (
    HUNG_PROBES,
    Action,
    Fail,
    Lifecycle,
    Phase,
    ProcessOrder,
)
from epd_portable.launch.run.logs import Progress, failure_line, latest_line
from epd_portable.launch.run.process import Child, describe_exit
from epd_portable.launch.run.running import ProcessRecord, RunRecord, write_record

_STEP_S = 0.1
_START_PROBE_EVERY_S = 0.5
_START_PROBE_TIMEOUT_S = 1.0
PROBE_EVERY_S = 5.0
PROBES = 24
"""At least so many within ``launch.hung_after_s``."""
_PROBE_THREADS = 64
"""Most silent processes probed at a time; while there are more, some are probed less often."""
NOTE_EVERY_S = 3.0
_ORPHAN_GRACE_S = 1.0
DRAIN_MARGIN_S = 5.0
"""Time of a front beyond its own grace, to close what is left."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Run of a plan in the foreground.

    Args:
        drain_s: How long open requests may go on at a stop.
        log_dir: Existing folder for one log file a process.
        temp_dir: Existing folder of the run; removed at the end.
        config: Path of the topology file, for the record.
    """

    def __init__(
        self,
        plan: Plan,
        launch: Launch,
        *,
        secret: Secret,
        drain_s: float,
        log_dir: Path,
        temp_dir: Path,
        say: Callable[[Notice], None],
        config: str = "",
    ) -> None:
        self._plan = plan
        self._config = config
        self._launch = launch
        self._drain_s = drain_s
        self._log_dir = log_dir
        self._temp_dir = temp_dir
        self._print = say
        self._specs = {spec.name: spec for spec in plan.processes}
        self._instances = [spec for spec in plan.processes if spec.role != "front"]
        self._children: dict[str, Child] = {}
        self._starts: Counter[str] = Counter()
        after = {name: spec.after for name, spec in self._specs.items()}
        self._lifecycle = Lifecycle(self._specs, launch, after)
        self._threads = ThreadPoolExecutor(_PROBE_THREADS, thread_name_prefix="epd-probe")
        self._probes: dict[Child, tuple[float, Future[bool]]] = {}  # With their starts.
        self._registrar = Registrar(
            plan, secret, is_up=self._answers, leave_timeout_s=drain_s, say=self._say
        )
        self._problems_noted: dict[str, str] = {}
        self._stop_requests = 0
        self._started, self._started_s = time.time(), time.monotonic()
        self._next_at: dict[str, float] = {}
        self._record: RunRecord | None = None
        self._warned: set[str] = set()

    def run(self) -> None:
        """Start everything, serve until a stop signal, end everything.

        Raises:
            LaunchError: A process did not start; everything has been ended.
        """
        with self._stop_signals():
            self._guard = self._new_guard()
            try:
                self.startup()
                while not self._stop_requests:
                    self._step()
            finally:
                self.shutdown()

    def startup(self) -> None:
        """Start every process; return when all are up at their fronts, or a stop was asked for.

        Raises:
            LaunchError: Names the process, the reason and its log file; or a front refuses an
                instance for good, or they are not up in time.
        """
        progress = Progress(started_at=self._started_s)
        self._perform(self._lifecycle.start_all(time.monotonic()))
        while not self._lifecycle.all_up() and not self._stop_requests:
            self._step(progress)
        if self._stop_requests:
            return
        self._registrar.start()
        limit_s = self._launch.startup_timeout_s
        end = time.monotonic() + limit_s
        while not self._stop_requests and (problems := self._registrar.problems()):
            for name, problem in problems.items():
                if isinstance(problem, RefusedError):
                    raise LaunchError(f"{name} cannot join: {problem}") from problem
            if time.monotonic() >= end:
                name, problem = next(iter(problems.items()))
                raise LaunchError(
                    f"instances are not up at {', '.join(self._plan.joins) or 'the front'} after "
                    f"{limit_s:g} s (launch.startup_timeout_s): "
                    f"{name}{f': {problem}' if problem else ''}"
                )
            self._step(progress)
        if not self._stop_requests:
            self._lifecycle.phase = Phase.SERVING
            self._note_problems()
            self._say(self._ready(elapsed_s=time.monotonic() - self._started_s))

    def shutdown(self) -> None:
        """End every process and remove what the run leaves behind.

        Once all have started, the front first ends what is open, with the instances that this
        needs. A further stop signal ends that, and the grace of the rest.

        Raises:
            LaunchError: Some process cannot be ended.
        """
        grace_s = self._launch.stop_grace_s
        asked = self._stop_requests
        if asked:
            self._say(Notice("stopping", "stopping"))
        self._write_record("stopping")
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._registrar.leaving.set()
        if asked and self._lifecycle.all_up():
            self._drain(until=lambda: self._stop_requests > asked)
        self._note_shared_memory()
        children = self._children.values()
        left = sessions.end_processes(
            [child.session for child in children],
            self._plan.run_id,
            grace_s=grace_s,
            reap=lambda: [child.exit_status() for child in children],
            hurry=lambda: self._stop_requests > asked,
        )
        mapped = (path for child in children for path in child.mapped)
        sessions.remove_unused(mapped, since=self._started)
        self._guard.close(timeout_s=grace_s + 10.0)
        if left:
            raise LaunchError(f"processes {', '.join(map(str, left))} do not end, not even killed")
        if asked:
            self._say(Notice("stopped", "stopped"))

    def _drain(self, *, until: Callable[[], bool]) -> None:
        """Wait until the front has ended, or instances have left others; these go on meanwhile."""
        front = self._children.get("front")
        text = f"open requests may take {self._drain_s:g} s to end (front.drain_s)"
        self._say(Notice("draining", text, {"drain_s": self._drain_s}))
        if front:
            sessions.send_signal(front.session, signal.SIGTERM)
        end = time.monotonic() + self._drain_s + DRAIN_MARGIN_S
        while time.monotonic() < end and not until():
            if self._registrar.has_ended() and (not front or front.exit_status() is not None):
                return
            self._keep_guarded()
            time.sleep(_STEP_S)

    def _step(self, progress: Progress | None = None) -> None:
        """Look after all processes, and rest."""
        now = time.monotonic()
        for name, child in list(self._children.items()):
            status = child.exit_status()
            if status is not None:
                how = describe_exit(status) + _last_words(child, status=status)
                self._bury(name)
                self._perform(self._lifecycle.exited(name, how, now))
        self._probe(now)
        if self._is_due("note", now, NOTE_EVERY_S):
            self._note_shared_memory()
        self._perform(self._lifecycle.tick(time.monotonic()))
        if self._lifecycle.phase is Phase.SERVING:
            self._note_problems()
        self._write_record(self._lifecycle.phase.value)
        self._keep_guarded()
        for notice in progress.notices(self._stages(), time.monotonic()) if progress else ():
            self._say(notice)
        time.sleep(_STEP_S)

    def _is_due(self, what: str, now: float, every_s: float) -> bool:
        due = now >= self._next_at.get(what, 0.0)
        if due:
            self._next_at[what] = now + every_s
        return due

    def _probe(self, now: float) -> None:
        """Probe processes that start, and less often and with longer timeouts those that serve."""
        for child in [child for child, (_, probe) in self._probes.items() if probe.done()]:
            name = child.spec.name
            asked_at, probe = self._probes.pop(child)
            if self._children.get(name) is not child:
                continue  # It has ended meanwhile.
            if probe.result():
                if self._lifecycle.states()[name] == "starting":
                    self._note_shared_memory()  # It may be killed before the next time.
                self._perform(self._lifecycle.healthy(name, now))
            else:
                self._perform(self._lifecycle.silent(name, asked_at, now))
        hung_after_s = self._launch.hung_after_s
        due: dict[str, Callable[[Child], bool]] = {}
        if self._is_due("start", now, _START_PROBE_EVERY_S):
            due["starting"] = partial(Child.is_ready, timeout_s=_START_PROBE_TIMEOUT_S)
        every_s = min(PROBE_EVERY_S, hung_after_s / PROBES)
        if hung_after_s and self._is_due("probe", now, every_s):
            due["up"] = partial(Child.is_well, timeout_s=hung_after_s / HUNG_PROBES)
        for name, state in self._lifecycle.states().items():
            asked = self._children.get(name)
            if state in due and asked and asked not in self._probes:
                self._probes[asked] = now, self._threads.submit(due[state], asked)

    def _answers(self, name: str) -> bool:
        """Return whether an instance answers now; one that hangs still counts as up."""
        child = self._children.get(name)
        return child is not None and child.is_ready(timeout_s=_START_PROBE_TIMEOUT_S)

    def _note_problems(self) -> None:
        """Report problems between instances that are new; `status` shows all."""
        found = self._registrar.noted()
        for name, problem in found.items():
            if self._problems_noted.get(name) != problem:
                self._say(Notice("warning", f"serving all the same: {problem}"))
        self._problems_noted = found

    def _keep_guarded(self) -> None:
        if not self._guard.alive:
            try:
                self._guard = self._new_guard()
            except (LaunchError, OSError) as error:
                text = "nothing would end this run if its launcher were killed, until there is a "
                self._warn_once(f"{text}guard: {error}")

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ProcessOrder("start", name):
                    self._start(name)
                case ProcessOrder(what, name):
                    signum = signal.SIGTERM if what == "stop" else signal.SIGKILL
                    sessions.send_signal(self._children[name].session, signum)
                case Notice() as notice:
                    self._say(notice)
                case Fail(name, reason):
                    # Still among the children if it did not end but took too long.
                    slow = self._children.get(name)
                    words = _last_words(slow, status=None) if slow else ""
                    raise LaunchError(f"{name} {reason}{words}")

    def _start(self, name: str) -> None:
        spec, run_id = self._specs[name], self._plan.run_id
        try:
            child = Child(spec, log_dir=self._log_dir, run_id=run_id, environ=os.environ)
        except LaunchError as error:
            # A death: there may be memory, room on the disk or its program again a little later.
            how = f"was not started: {error}"
            self._perform(self._lifecycle.exited(name, how, time.monotonic()))
            return
        self._guard.watch(child.session)
        self._children[name] = child
        self._starts[name] += 1

    def _bury(self, name: str) -> None:
        """End what a dead process left running, so that its ports and devices are free again."""
        child = self._children.pop(name)
        sessions.end_processes([child.session], None, grace_s=_ORPHAN_GRACE_S)
        sessions.remove_unused(child.mapped, since=self._started)
        self._guard.forget(child.session)

    def _note_shared_memory(self) -> None:
        """Note what each child's processes map, in case they are killed before they remove it."""
        children = {child.session: child for child in self._children.values()}
        for pid, session in sessions.members(children, None).items():
            children[session].mapped |= sessions.mapped_files([pid])

    def _stages(self) -> dict[str, str]:
        states = self._lifecycle.states()
        stages = {
            name: latest_line(child.output())
            for name, child in self._children.items()
            if states[name] == "starting"
        }
        for name, problem in self._registrar.problems().items() if not stages else ():
            stages[name] = str(problem or "is not up at its fronts")
        for name, others in self._lifecycle.waiting().items():
            stages[name] = f"waits for {' and '.join(others)} on its device"
        return stages

    def _ready(self, *, elapsed_s: float) -> Notice:
        """Return the notice with the addresses of the front and of each instance."""
        rows = [
            (f"  {spec.name}", spec.role, spec.url, ports_text(spec.ports, without="http"))
            for spec in self._instances
        ]
        counts = Counter(spec.role.replace("-", "_") for spec in self._instances)
        roles = ", ".join(f"{count} {role}" for role, count in counts.items())
        first = f"ready: {self._plan.url} ({roles}, {self._plan.platform}) in {elapsed_s:.0f} s"
        processes = [spec.public() for spec in self._plan.processes]
        fields = {"url": self._plan.url, "elapsed_s": round(elapsed_s, 1), "processes": processes}
        return Notice("ready", "\n".join([first, *columns(rows)]), fields)

    def _write_record(self, phase: str) -> None:
        """Write the run's record, for `find_runs`, when it has changed."""
        plan = self._plan
        record = RunRecord(
            **{key: getattr(plan, key) for key in ("run_id", "platform", "model", "url")},
            phase=phase,
            config=self._config,
            pid=os.getpid(),
            started_s=self._started_s,
            processes=tuple(
                ProcessRecord(
                    **self._specs[name].public(),
                    state=state,
                    log=str((self._log_dir / f"{name}.log").absolute()),
                    pid=child.session if (child := self._children.get(name)) else None,
                    started_s=child.started_s if child else None,
                    restarts=max(0, self._starts[name] - 1),
                    problem=self._problems_noted.get(name, ""),
                )
                for name, state in self._lifecycle.states().items()
            ),
        )
        if record == self._record:
            return
        self._record = record
        try:
            write_record(self._temp_dir, record)
        except OSError as error:
            # A full disk ends no topology.
            self._warn_once(f"`epd-launch status` shows this run as it was: {error}")

    def _new_guard(self) -> Guard:
        return Guard(
            run_id=self._plan.run_id,
            temp_dir=self._temp_dir,
            grace_s=self._launch.stop_grace_s,
            log=self._log_dir / "guard.log",
            sessions=[child.session for child in self._children.values()],
        )

    def _say(self, notice: Notice) -> None:
        # What cannot be printed, on a full disk or into a closed pipe, ends no topology, and there
        # is nowhere left to say so.
        with contextlib.suppress(OSError):
            self._print(notice)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._say(Notice("warning", text))

    @contextlib.contextmanager
    def _stop_signals(self) -> Iterator[None]:
        def stop(signum: int, frame: FrameType | None) -> None:
            # A terminal that is closed sends SIGHUP, and so does its shell: once is meant.
            self._stop_requests += signum != signal.SIGHUP or not self._stop_requests

        # Under nohup the launcher outlives its terminal.
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heard = [each for each in _STOP_SIGNALS if each != signal.SIGHUP or not ignored]
        before = {signum: signal.signal(signum, stop) for signum in heard}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


def _last_words(child: Child, *, status: int | None) -> str:
    # The last line of a process that was killed has nothing to do with its end.
    words = failure_line(child.output(), guess=status is None or status >= 0)
    return f"{words and f': {words}'} (log: {child.log})"
