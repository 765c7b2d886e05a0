"""Runs a plan: start, serve, stop. Each process is kept by a `Lifecycle`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from epd_portable.config.schema import Launch
from epd_portable.config.secret import Secret
from epd_portable.errors import LaunchError
from epd_portable.launch.notices import Notice
from epd_portable.launch.plan.processes import Plan, ProcessSpec, columns, ports_text
from epd_portable.launch.run import sessions
from epd_portable.launch.run.fronts import Registrar
from epd_portable.launch.run.guard import Guard
from epd_portable.launch.run.lifecycle import STEP_S, Child, Lifecycle
from epd_portable.launch.run.logs import Progress, latest_line
from epd_portable.launch.run.running import ProcessRecord, RunRecord, write_record

NOTE_EVERY_S = 3.0
_ANSWER_S = 1.0
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
        self._processes: dict[str, Lifecycle] = {}
        for spec in plan.processes:
            self._processes[spec.name] = Lifecycle(
                spec,
                launch,
                self._processes,
                start=self._start,
                clean_up=self._clean_up,
                say=self._say,
            )
        self._registrar = Registrar(
            plan, launch, secret, is_up=self._answers, leave_timeout_s=drain_s, say=self._say
        )
        self._phase: Literal["starting", "serving", "stopping"] = "starting"
        self._problems_noted: dict[str, str] = {}
        self._stop_requests = 0
        self._started = time.time()
        self._record: RunRecord | None = None
        self._warned: set[str] = set()

    def run(self) -> None:
        """Start everything, serve until a stop signal, end everything.

        Raises:
            LaunchError: A process did not start, an instance is refused by a front for good, or
                some are not up in time; everything has been ended. Or some process cannot be ended.
        """
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._started_s = asyncio.get_running_loop().time()
        stop = asyncio.Event()
        self._listen(stop)
        self._guard = Guard(
            run_id=self._plan.run_id,
            temp_dir=self._temp_dir,
            grace_s=self._launch.stop_grace_s,
            log=self._log_dir / "guard.log",
        )
        keeping = [each.keep() for each in self._processes.values()]
        work = [*keeping, self._follow_fronts(), self._look_after(), stop.wait()]
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._shutdown()

    async def _follow_fronts(self) -> None:
        """Follow the fronts once all processes are up; never returns."""
        while any(each.state != "up" for each in self._processes.values()):
            await asyncio.sleep(STEP_S)
        await self._registrar.follow()

    async def _look_after(self) -> None:
        """Report the progress of a start, and keep the record and the guard; never returns."""
        now, note_at = asyncio.get_running_loop().time, 0.0
        progress = Progress(started_at=self._started_s)
        while True:
            if now() >= note_at:
                note_at = now() + NOTE_EVERY_S
                self._note_shared_memory()
            if self._phase == "serving":
                self._note_problems()
            elif self._registrar.have_joined():
                self._phase = "serving"
                for each in self._processes.values():
                    each.serving = True
                self._note_problems()
                self._say(self._ready(elapsed_s=now() - self._started_s))
            else:
                for notice in progress.notices(self._stages(), now()):
                    self._say(notice)
            self._write_record()
            self._keep_guarded()
            await asyncio.sleep(STEP_S)

    async def _shutdown(self) -> None:
        """End every process and remove what the run leaves behind.

        Once all have started, the front first ends what is open, with the instances that this
        needs. A further stop signal ends that, and the grace of the rest.
        """
        grace_s = self._launch.stop_grace_s
        asked, serves = self._stop_requests, self._phase == "serving"
        if asked:
            self._say(Notice("stopping", "stopping"))
        self._phase = "stopping"
        self._write_record()
        leaving = asyncio.ensure_future(self._registrar.leave())
        if asked and serves:
            await self._drain(leaving, until=lambda: self._stop_requests > asked)
        self._note_shared_memory()
        children = self._children()
        left = await asyncio.to_thread(
            sessions.end_processes,
            [child.session for child in children],
            self._plan.run_id,
            grace_s=grace_s,
            hurry=lambda: self._stop_requests > asked,
        )
        leaving.cancel()
        mapped = (path for child in children for path in child.mapped)
        sessions.remove_unused(mapped, since=self._started)
        self._guard.close(timeout_s=grace_s + 10.0)
        if left:
            raise LaunchError(f"processes {', '.join(map(str, left))} do not end, not even killed")
        if asked:
            self._say(Notice("stopped", "stopped"))

    async def _drain(self, leaving: asyncio.Future[None], until: Callable[[], bool]) -> None:
        """Wait until the front has ended, or instances have left others; these go on meanwhile."""
        text = f"open requests may take {self._drain_s:g} s to end (front.drain_s)"
        self._say(Notice("draining", text, {"drain_s": self._drain_s}))
        front = self._processes["front"].child if "front" in self._processes else None
        if front:
            front.send_signal(signal.SIGTERM)
        now = asyncio.get_running_loop().time
        end = now() + self._drain_s + DRAIN_MARGIN_S
        while now() < end and not until():
            if leaving.done() and (not front or front.exit_status() is not None):
                return
            self._keep_guarded()
            await asyncio.sleep(STEP_S)

    async def _answers(self, name: str) -> bool:
        """Return whether an instance responds now; one that hangs still counts as up."""
        child = self._processes[name].child
        return child is not None and await child.is_ready(timeout_s=_ANSWER_S)

    def _start(self, spec: ProcessSpec) -> Child:
        child = Child(spec, log_dir=self._log_dir, run_id=self._plan.run_id)
        self._guard.watch(child.session)
        return child

    async def _clean_up(self, child: Child) -> None:
        """End what a dead process left running, so that its ports and devices are free again."""
        await asyncio.to_thread(
            sessions.end_processes, [child.session], None, grace_s=_ORPHAN_GRACE_S
        )
        sessions.remove_unused(child.mapped, since=self._started)
        self._guard.forget(child.session)

    def _children(self) -> list[Child]:
        return [each.child for each in self._processes.values() if each.child]

    def _note_shared_memory(self) -> None:
        # One look at the processes of this machine, however many children there are.
        children = {child.session: child for child in self._children()}
        for pid, session in sessions.members(children, None).items():
            children[session].mapped |= sessions.mapped_files([pid])

    def _note_problems(self) -> None:
        """Report problems between instances that are new; `status` shows all."""
        found = self._registrar.noted()
        for name, problem in found.items():
            if self._problems_noted.get(name) != problem:
                self._say(Notice("warning", f"serving all the same: {problem}"))
        self._problems_noted = found

    def _keep_guarded(self) -> None:
        try:
            self._guard.replace_if_gone()
        except (LaunchError, OSError) as error:
            text = "nothing would end this run if its launcher were killed, until there is a "
            self._warn_once(f"{text}guard: {error}")

    def _stages(self) -> dict[str, str]:
        """Return what each process does that is not ready."""
        stages = {}
        for name, each in self._processes.items():
            if each.child and each.state == "starting":
                stages[name] = latest_line(each.child.output())
            elif others := each.state == "waiting" and each.blocking():
                stages[name] = f"waits for {' and '.join(others)} on its device"
        if not stages:
            for name, problem in self._registrar.problems().items():
                stages[name] = str(problem or "is not up at its fronts")
        return stages

    def _ready(self, *, elapsed_s: float) -> Notice:
        """Return the notice with the addresses of the front and of each instance."""
        instances = [spec for spec in self._plan.processes if spec.role != "front"]
        rows = [
            (f"  {spec.name}", spec.role, spec.url, ports_text(spec.ports, without="http"))
            for spec in instances
        ]
        counts = Counter(spec.role.replace("-", "_") for spec in instances)
        roles = ", ".join(f"{count} {role}" for role, count in counts.items())
        first = f"ready: {self._plan.url} ({roles}, {self._plan.platform}) in {elapsed_s:.0f} s"
        processes = [spec.public() for spec in self._plan.processes]
        fields = {"url": self._plan.url, "elapsed_s": round(elapsed_s, 1), "processes": processes}
        return Notice("ready", "\n".join([first, *columns(rows)]), fields)

    def _write_record(self) -> None:
        """Write the run's record, for `find_runs`, when it has changed."""
        plan = self._plan
        record = RunRecord(
            **{key: getattr(plan, key) for key in ("run_id", "platform", "model", "url")},
            phase=self._phase,
            config=self._config,
            pid=os.getpid(),
            started_s=self._started_s,
            processes=tuple(
                ProcessRecord(
                    **each.spec.public(),
                    state=each.state,
                    log=str((self._log_dir / f"{name}.log").absolute()),
                    pid=each.child.session if each.child else None,
                    started_s=each.child.started_s if each.child else None,
                    restarts=max(0, each.starts - 1),
                    problem=self._problems_noted.get(name, ""),
                )
                for name, each in self._processes.items()
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

    def _say(self, notice: Notice) -> None:
        # What cannot be printed, on a full disk or into a closed pipe, ends no topology, and there
        # is nowhere left to report it.
        with contextlib.suppress(OSError):
            self._print(notice)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._say(Notice("warning", text))

    def _listen(self, stop: asyncio.Event) -> None:
        """Count stop signals from now on."""

        def heard(signum: int) -> None:
            # A terminal that is closed sends SIGHUP, and its shell sends it, too: once is meant.
            self._stop_requests += signum != signal.SIGHUP or not self._stop_requests
            stop.set()

        for signum in _STOP_SIGNALS:
            # Under nohup the launcher outlives its terminal.
            if signal.getsignal(signum) is not signal.SIG_IGN or signum != signal.SIGHUP:
                asyncio.get_running_loop().add_signal_handler(signum, heard, signum)
