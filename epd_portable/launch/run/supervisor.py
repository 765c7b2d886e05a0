"""Runs a plan: start, serve, stop. Decisions are ``lifecycle``'s; this is the shell around them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from epd_portable.config.schema import Launch
from epd_portable.config.secret import Secret
from epd_portable.errors import LaunchError, RefusedError
from epd_portable.launch.notices import Notice
from epd_portable.launch.plan.processes import Plan, shm_prefix
from epd_portable.launch.plan.text import columns, ports_text
from epd_portable.launch.run import sessions
from epd_portable.launch.run.fork_server import ForkServer
from epd_portable.launch.run.front_client import FrontClient, FrontClients
from epd_portable.launch.run.guard import Guard
from epd_portable.launch.run.lifecycle import (
    HUNG_PROBES,
    Action,
    Fail,
    Lifecycle,
    Phase,
    ProcessOrder,
)
from epd_portable.launch.run.log_files import rotate
from epd_portable.launch.run.logs import FIRST_STAGE, Progress, failure_line, latest_stage
from epd_portable.launch.run.process import (
    FORK_SERVER_LOG,
    Child,
    Probes,
    describe_exit,
    start_fork_server,
)
from epd_portable.launch.run.registrar import Registrar
from epd_portable.launch.run.running import ProcessRecord, RunRecord, write_record
from epd_portable.launch.run.update import RollingUpdate
from epd_portable.launch.run.wait import Wait

_STEP_S = 0.1
_START_PROBE_EVERY_S = 0.5
_START_PROBE_TIMEOUT_S = 1.0
PROBE_EVERY_S = 5.0
PROBES = 24
"""At least so many within ``launch.hung_after_s``."""
_LOG_FILES = 3
_ROTATE_EVERY_S = 0.5
_NOTE_EVERY_S = 3.0
_PROBLEMS_EVERY_S = 10.0
_ORPHAN_GRACE_S = 1.0
DRAIN_MARGIN_S = 5.0
"""What a front may take longer than its own grace, to close what is left."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Supervisor:
    """One run of a plan in the foreground.

    Args:
        drain_s: How long open requests may go on: of the front at a stop, of an instance at an
            update.
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
        self._secret = secret
        self._drain_s = drain_s
        self._log_dir = log_dir
        self._temp_dir = temp_dir
        self._print = say
        self._specs = {spec.name: spec for spec in plan.processes}
        self._instances = [spec for spec in plan.processes if spec.role != "front"]
        self._children: dict[str, Child] = {}
        self._fork_server: ForkServer | None = None
        self._forks = True
        self._starts: Counter[str] = Counter()
        after = {name: spec.after for name, spec in self._specs.items()}
        self._lifecycle = Lifecycle(self._specs, launch, after)
        self._probes = Probes()
        self._problem_thread = ThreadPoolExecutor(1, thread_name_prefix="epd-problems")
        self._problem_look: Future[dict[str, str]] | None = None
        self._problems_noted: dict[str, str] = {}
        self._fronts = self._front_clients()
        self._registrar: Registrar | None = None
        if plan.joins:
            self._registrar = Registrar(
                plan.members,
                plan.joins,
                secret,
                is_up=self._answers,
                leave_timeout_s=drain_s,
                say=self._say,
            )
        self._has_joined = False
        self._away = ""  # why instances are not up at the topology's own front
        self._update: RollingUpdate | None = None
        self._deciding = threading.Lock()  # An update runs in its own thread.
        self._stop_requests = 0
        self._hangups = 0
        self._had_terminal = _has_terminal()
        self._outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
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
                self.main_loop()
            finally:
                self.shutdown()

    def startup(self) -> None:
        """Start every process and return when all are healthy, or a stop was asked for.

        Raises:
            LaunchError: Names the process, the reason and its log file.
        """
        started_at = time.monotonic()
        progress = Progress(started_at=started_at)
        self._preload(progress)
        if self._stop_requests:
            return
        self._perform(self._lifecycle.start_all(time.monotonic()))
        while self._lifecycle.phase is Phase.STARTING and not self._stop_requests:
            self._step(progress)
        if self._registrar is not None:
            self._join_fronts(self._registrar, progress)
        self._has_joined = True
        if not self._stop_requests:
            with contextlib.suppress(LaunchError):
                self._note_problems(self._problems())
            self._say(self._ready(elapsed_s=time.monotonic() - started_at))

    def _join_fronts(self, registrar: Registrar, progress: Progress) -> None:
        """Register all instances, and return when they are up at every front.

        Raises:
            LaunchError: A front refuses one for good, or they are not up in time.
        """
        registrar.start()
        wait = Wait(
            f"instances are not up at {', '.join(self._plan.joins)}",
            self._launch.startup_timeout_s,
            limit="launch.startup_timeout_s",
        )
        while not self._stop_requests and (problems := registrar.problems()):
            for name, problem in problems.items():
                if isinstance(problem, RefusedError):
                    raise LaunchError(f"{name} cannot join: {problem}") from problem
            name, problem = next(iter(problems.items()))
            wait.go_on(f"{name}{f': {problem}' if problem else ''}")
            self._step(progress)

    def _preload(self, progress: Progress) -> None:
        """Wait until processes can be forked; if that is not to be, they start by themselves."""
        self._fork_server = server = start_fork_server(
            self._plan.processes,
            log_dir=self._log_dir,
            run_id=self._plan.run_id,
            environ=os.environ,
        )
        if server is None:
            return
        end = time.monotonic() + self._launch.startup_timeout_s
        while not (server.is_ready() or server.has_ended() or self._stop_requests):
            if time.monotonic() > end:
                sessions.send_signal(server.pid, signal.SIGKILL)
            for notice in progress.notices({"fork server": FIRST_STAGE}, time.monotonic()):
                self._say(notice)
            time.sleep(_STEP_S)

    def _running_fork_server(self) -> ForkServer | None:
        """Return what processes are forked from; ``None`` once they start by themselves."""
        if self._fork_server is not None and self._fork_server.has_ended():
            self._fork_server = None
            log = self._log_dir / FORK_SERVER_LOG
            text = f"the fork server has ended: processes start by themselves (log: {log})"
            self._say(Notice("warning", text))
        return self._fork_server

    def main_loop(self) -> None:
        """Keep every process alive until a stop is asked for."""
        while not self._stop_requests:
            self._step()

    def shutdown(self) -> None:
        """End every process and remove what the run leaves behind.

        While it serves, the front first ends what is open, with the instances that this needs. A
        further stop signal ends that, and the grace of the rest.

        Raises:
            LaunchError: Some process cannot be ended.
        """
        grace_s = self._launch.stop_grace_s
        asked = self._stop_requests
        if asked:
            self._say(Notice("stopping", "stopping"))
        self._write_record("stopping")
        self._probes.close()
        self._problem_thread.shutdown(wait=False, cancel_futures=True)
        if self._update is not None:
            self._update.give_up()
        if self._registrar is not None:
            self._registrar.leaving.set()
        if asked and self._lifecycle.phase is Phase.SERVING:
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
        if self._fork_server is not None:
            self._fork_server.close()
        mapped = (path for child in children for path in child.mapped)
        sessions.remove_unused(mapped, since=self._started)
        self._guard.close(timeout_s=grace_s + 10.0)
        if left:
            raise LaunchError(f"processes {', '.join(map(str, left))} do not end, not even killed")
        if asked:
            self._say(Notice("stopped", "stopped"))

    def _drain(self, *, until: Callable[[], bool]) -> None:
        """Wait until fronts have ended, or instances have left them; these go on meanwhile."""
        fronts = [
            child
            for child in self._children.values()
            if child.spec.role == "front" and child.exit_status() is None
        ]
        text = f"open requests may take {self._drain_s:g} s to end (front.drain_s)"
        self._say(Notice("draining", text, {"drain_s": self._drain_s}))
        for front in fronts:
            sessions.send_signal(front.session, signal.SIGTERM)
        end = time.monotonic() + self._drain_s + DRAIN_MARGIN_S
        while time.monotonic() < end and not until():
            has_left = self._registrar is None or self._registrar.has_ended()
            if has_left and all(front.exit_status() is not None for front in fronts):
                return
            self._keep_guarded()
            time.sleep(_STEP_S)

    def _step(self, progress: Progress | None = None) -> None:
        with self._deciding:
            self._look_after_all()
        if progress is not None:
            for notice in progress.notices(self._stages(), time.monotonic()):
                self._say(notice)
        time.sleep(_STEP_S)

    def _look_after_all(self) -> None:
        now = time.monotonic()
        for name, child in list(self._children.items()):
            status = child.exit_status()
            if status is not None:
                how = describe_exit(status) + _last_words(child, status=status)
                self._bury(name)
                self._perform(self._lifecycle.exited(name, how, now))
        self._probe(now)
        if self._is_due("note", now, _NOTE_EVERY_S):
            self._note_shared_memory()
        if self._is_due("rotate", now, _ROTATE_EVERY_S):
            self._rotate_logs()
        self._perform(self._lifecycle.tick(time.monotonic()))
        if self._hangups:
            self._hangups = 0
            self._hung_up()
        if self._phase is Phase.SERVING:
            self._look_for_problems(now)
        self._write_record(self._phase.value)
        self._keep_guarded()

    @property
    def _phase(self) -> Phase:
        """That of the topology, which starts until its instances are up at fronts elsewhere."""
        phase = self._lifecycle.phase
        return Phase.STARTING if phase is Phase.SERVING and not self._has_joined else phase

    def _is_due(self, what: str, now: float, every_s: float) -> bool:
        due = now >= self._next_at.get(what, 0.0)
        if due:
            self._next_at[what] = now + every_s
        return due

    def _probe(self, now: float) -> None:
        """Probe processes that start, and less often and with longer timeouts those that serve."""
        for child, asked_at, well in self._probes.answered():
            name = child.spec.name
            if self._children.get(name) is not child:
                continue  # It has ended meanwhile.
            if well:
                if name in self._lifecycle.pending():
                    child.spread_api_server()
                self._perform(self._lifecycle.healthy(name, now))
            else:
                self._perform(self._lifecycle.silent(name, asked_at, now))
        if self._is_due("start probe", now, _START_PROBE_EVERY_S):
            for name in self._lifecycle.pending():
                self._probes.ask(self._children[name], self._is_ready)
        hung_after_s = self._launch.hung_after_s
        every_s = min(PROBE_EVERY_S, hung_after_s / PROBES)
        if hung_after_s and self._is_due("probe", now, every_s):
            timeout_s = hung_after_s / HUNG_PROBES
            for name in self._lifecycle.up():
                self._probes.ask(
                    self._children[name], lambda child: child.is_well(timeout_s=timeout_s)
                )

    def _is_ready(self, child: Child) -> bool:
        """Return whether a process has started; a front with the topology has all instances up."""
        if child.spec.role != "front" or self._lifecycle.phase is not Phase.STARTING:
            return child.is_ready(timeout_s=_START_PROBE_TIMEOUT_S)
        try:
            away = [each for each in self._seen_by_fronts() if each["state"] != "up"]
        except LaunchError as error:
            self._away = str(error)
            return False
        reasons = [f"{each['name']}: {each['reason']}" for each in away if each["reason"]]
        self._away = "; ".join(reasons)
        return not away

    def _answers(self, name: str) -> bool:
        """Return whether an instance answers now; one that hangs still counts as up."""
        child = self._children.get(name)
        return child is not None and child.is_ready(timeout_s=_START_PROBE_TIMEOUT_S)

    def _problems(self) -> dict[str, str]:
        """Return what went wrong when our instances met others, by their names."""
        found: dict[str, str] = {}
        for each in self._seen_by_fronts():
            if problem := each.get("problem"):  # Fronts of older releases report none.
                found.setdefault(each["name"], problem)
        return found

    def _note_problems(self, problems: Mapping[str, str]) -> None:
        """Report problems that are new; `status` shows all."""
        for name, problem in problems.items():
            if self._problems_noted.get(name) != problem:
                self._say(Notice("warning", f"serving all the same: {problem}"))
        self._problems_noted = dict(problems)

    def _look_for_problems(self, now: float) -> None:
        """Take in what fronts report, and ask again: an update may bring another release."""
        if self._problem_look is not None and self._problem_look.done():
            with contextlib.suppress(LaunchError):
                self._note_problems(self._problem_look.result())
            self._problem_look = None
        if self._problem_look is None and self._is_due("problems", now, _PROBLEMS_EVERY_S):
            self._problem_look = self._problem_thread.submit(self._problems)

    def _seen_by_fronts(self) -> list[dict[str, Any]]:
        """Return what fronts say of instances of ours."""
        ask = functools.partial(FrontClient.instances, timeout_s=_START_PROBE_TIMEOUT_S)
        seen = itertools.chain.from_iterable(self._fronts.each(ask))
        return [each for each in seen if each["name"] in self._specs]

    def _hung_up(self) -> None:
        """Stop if the terminal was closed, but not under nohup; otherwise begin an update."""
        if self._had_terminal and not _has_terminal():
            self._had_terminal = False
            self._stop_requests += not self._outlives_terminal
        elif self._phase is not Phase.SERVING:
            self._say(Notice("update_refused", "no update while the topology starts"))
        elif self._update is not None and not self._update.ended:
            text = "an update is under way; ask again when it has ended"
            self._say(Notice("update_refused", text))
        else:
            self._forks = False
            self._update = RollingUpdate(
                self._instances,
                fronts=self._fronts,
                drain_s=self._drain_s,
                patience_s=self._launch.stop_grace_s + self._launch.startup_timeout_s,
                up=self._lifecycle.up,
                renew=self._renew,
                say=self._say,
            )
            self._update.start()

    def _renew(self, name: str) -> None:
        """End an instance and start it again; one that has died meanwhile is started for that."""
        with self._deciding:
            if name in self._lifecycle.up():
                self._perform(self._lifecycle.renew(name, time.monotonic()))

    def _front_clients(self) -> FrontClients:
        """Return the fronts elsewhere that instances join, or the one of the plan."""
        fronts = [spec for spec in self._plan.processes if spec.role == "front"]
        urls = self._plan.joins or [spec.url for spec in fronts]
        cert_file = fronts[0].tls_cert_file if fronts else ""
        return FrontClients(urls, self._secret, cert_file=cert_file)

    def _keep_guarded(self) -> None:
        if not self._guard.alive:
            try:
                self._guard = self._new_guard()
            except (LaunchError, OSError) as error:
                text = (
                    "nothing would end this run if its launcher were killed, until there is a guard"
                )
                self._warn_once(f"{text}: {error}")

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
                    raise LaunchError(
                        f"{name} {reason}{_last_words(slow, status=None) if slow else ''}"
                    )

    def _start(self, name: str) -> None:
        try:
            child = Child(
                self._specs[name],
                log_dir=self._log_dir,
                run_id=self._plan.run_id,
                environ=os.environ,
                # After an update what is installed then is to run.
                fork_server=self._running_fork_server() if self._forks else None,
            )
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

    def _rotate_logs(self) -> None:
        for name in self._specs:
            log = self._log_dir / f"{name}.log"
            try:
                rotate(log, max_bytes=self._launch.log_max_bytes, files=_LOG_FILES)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._warn_once(f"what {log} held is dropped: it cannot be kept ({error})")

    def _stages(self) -> dict[str, str]:
        pending = self._lifecycle.pending()
        stages = {
            name: latest_stage(child.output()) if name in pending else "ready"
            for name, child in self._children.items()
        }
        late = [name for name, stage in stages.items() if stage != "ready"]
        if self._away and late and all(self._specs[name].role == "front" for name in late):
            stages |= {name: f"{stages[name]}: {self._away}" for name in late}
        for name, problem in self._registrar.problems().items() if self._registrar else ():
            if stages.get(name) == "ready":
                stages[name] = f"joins its fronts{f': {problem}' if problem else ''}"
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
        roles = roles or "no instances of its own"
        first = f"ready: {self._plan.url} ({roles}, {self._plan.platform}) in {elapsed_s:.0f} s"
        fields = {
            "url": self._plan.url,
            "elapsed_s": round(elapsed_s, 1),
            "processes": [
                {"name": spec.name, "role": spec.role, "url": spec.url, "ports": spec.ports}
                for spec in self._plan.processes
            ],
        }
        return Notice("ready", "\n".join([first, *columns(rows)]), fields)

    def _write_record(self, phase: str) -> None:
        """Write the run's record, for `find_runs`, when it has changed."""
        record = RunRecord(
            run_id=self._plan.run_id,
            phase=phase,
            platform=self._plan.platform,
            model=self._plan.model,
            url=self._plan.url,
            config=self._config,
            pid=os.getpid(),
            started_s=self._started_s,
            processes=tuple(
                ProcessRecord(
                    name=name,
                    role=self._specs[name].role,
                    state=state,
                    url=self._specs[name].url,
                    ports=self._specs[name].ports,
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
            shm_prefix=shm_prefix(self._plan.run_id),
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
            self._stop_requests += 1

        def hang_up(signum: int, frame: FrameType | None) -> None:
            self._hangups += 1

        before = {signum: signal.signal(signum, stop) for signum in _STOP_SIGNALS}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, hang_up)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal; a closed one is none any more."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _last_words(child: Child, *, status: int | None) -> str:
    # The last line of a process that was killed has nothing to do with its end.
    words = failure_line(child.output(), guess=status is None or status >= 0)
    return f"{words and f': {words}'} (log: {child.log})"
