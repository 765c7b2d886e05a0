"""Topologies of stand-in servers under the real supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from epd_portable.config.secret import Secret, make_secret_file
from epd_portable.launch.environment import new_run_id
from epd_portable.launch.plan.machine import is_free, port_source
from epd_portable.launch.plan.processes import ProcessSpec
from epd_portable.launch.run import sessions
from epd_portable.launch.run.fronts import FrontClient
from epd_portable.launch.run.lifecycle import Child
from epd_portable.launch.run.running import RUN_FOLDER
from tests import warm

HERE = Path(__file__).parent
RUN_PLAN = "tests.integration.launch.run_plan"
FORKED = f"import os; os.setsid(); os.dup2(1, 2); from {RUN_PLAN} import main; main()"
"""A launcher in a session of its own, that says everything at its standard output."""
DEADLINE_S = 60.0
ROLES = {"encode": "encode", "other": "encode", "pd": "prefill-decode", "front": "front"}
Options: TypeAlias = list[str] | Callable[[dict[str, int]], list[str]]
"""Options of a fake process; or the words of another command, from the ports of all."""


class Run:
    """A launcher process with its fake processes."""

    def __init__(
        self,
        folder: Path,
        servers: dict[str, Options],
        launch: dict[str, Any],
        popen: dict[str, Any],
        specs: dict[str, dict[str, Any]],
        **settings: Any,
    ) -> None:
        self.run_id = secrets.token_hex(4)
        self.secret = Secret(settings["secret"])
        self.temp_dir = folder / f"{RUN_FOLDER}{self.run_id}"
        self.temp_dir.mkdir()
        self.log_dir = folder / f"logs-{self.run_id}"
        self.log_dir.mkdir()
        next_port = port_source(self.run_id)
        self.ports = {name: next_port() for name in servers}
        processes = [
            {
                "name": name,
                "role": ROLES[name.partition("-")[0]],
                "argv": [sys.executable, *self._words(name, options)],
                "env": {},
                "url": f"http://127.0.0.1:{self.ports[name]}",
                "ports": {},
                **specs.get(name, {}),
            }
            for name, options in servers.items()
        ]
        plan = folder / f"plan-{self.run_id}.json"
        content = {
            "run_id": self.run_id,
            "processes": processes,
            "launch": launch,
            "log_dir": str(self.log_dir),
            "temp_dir": str(self.temp_dir),
            **settings,
        }
        plan.write_text(json.dumps(content), "utf-8")
        self.lines: list[str] = []
        self._queue: queue.Queue[str] = queue.Queue()
        env = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
        self.process: warm.Process
        if popen:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "run_plan.py"), str(plan)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=env,
                **popen,
            )
        else:
            nursery = warm.nursery(RUN_PLAN)
            self.process = nursery.popen("-c", FORKED, plan, stdout=subprocess.PIPE, env=env)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _words(self, name: str, options: Options) -> list[str]:
        if callable(options):
            return options(self.ports)
        given = [option.format(shm=f"epd-{self.run_id}-{name}") for option in options]
        return [str(HERE / "stand_in.py"), f"--port={self.ports[name]}", *given]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))

    def wait_for(self, text: str) -> str:
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no line with {text!r}; there were: {self.lines}")
            self.lines.append(line)
            if text in line:
                return line

    def all_lines(self) -> list[str]:
        """Return what an ended launcher has said, unread lines included."""
        self._reader.join()
        while not self._queue.empty():
            self.lines.append(self._queue.get())
        return self.lines

    def ask(
        self,
        name: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float = DEADLINE_S,
    ) -> str:
        """Return what a process answers.

        Raises:
            OSError: It does not, or not 200.
        """
        url = f"http://127.0.0.1:{self.ports[name]}{path}"
        data = json.dumps(body).encode() if body else None
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return str(answer.read(), "utf-8")

    def pid_of(self, name: str) -> int:
        """Return the pid of the process that listens for ``name``."""
        wanted = f"--port={self.ports[name]}"
        found = []
        for each in sessions.members([], self.run_id):
            with contextlib.suppress(psutil.NoSuchProcess):  # It has just ended.
                if wanted in psutil.Process(each).cmdline():
                    found.append(each)
        (pid,) = found
        return pid

    def guard_pids(self) -> list[int]:
        """Return the pids of the living guards of the run."""
        wanted = ["epd_portable.launch.run.guard", self.run_id]
        found = psutil.process_iter(["cmdline"])
        return [each.pid for each in found if (each.info["cmdline"] or [])[2:4] == wanted]

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {what}"
            time.sleep(0.02)

    def nothing_left(self) -> bool:
        """Return whether no process, port, temporary folder or shared file of the run is left."""
        return (
            not sessions.members([], self.run_id)
            and all(is_free(port) for port in self.ports.values())
            and not list(sessions.SHM.glob(f"epd-{self.run_id}-*"))
            and not self.temp_dir.exists()
        )

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the launcher, which ends well."""
        self.process.send_signal(signum)
        self.ends_well()

    def ends_well(self, status: int = 0) -> None:
        """Check that the launcher ends with a status, and leaves nothing."""
        assert self.process.wait(DEADLINE_S) == status
        assert self.nothing_left()

    def close(self) -> None:
        """End what a failed test left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        sessions.end_processes([], self.run_id, grace_s=0.0)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def spec_of(*argv: str, **fields: Any) -> ProcessSpec:
    """Return a process ``x`` that runs Python."""
    made = {"name": "x", "role": "encode", "env": {}, "url": "http://127.0.0.1:1", "ports": {}}
    return ProcessSpec(argv=(sys.executable, *argv), **{**made, **fields})


def child_of(folder: Path, *argv: str, **fields: Any) -> Child:
    """Start such a process, whose log is in a folder."""
    spec = spec_of(*argv, **fields)
    return Child(spec, log_dir=folder, run_id=new_run_id())


class Asked:
    """A request through the front, under way in a thread until its engine is released."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._answers: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._complete, daemon=True)
        before = in_flight(run)
        self._thread.start()
        run.until(lambda: in_flight(run) > before, "an engine has the request")

    def _complete(self) -> None:
        body = {"model": "demo", "prompt": "x"}
        try:
            self._answers.append(json.loads(self._run.ask("front", "/v1/completions", body, 120.0)))
        except (OSError, http.client.HTTPException) as error:
            self._answers.append({"error": repr(error)})

    def ended(self) -> dict[str, Any]:
        """Return the answer or the error."""
        self._thread.join(DEADLINE_S)
        return self._answers[0]


def client_of(run: Run) -> FrontClient:
    return FrontClient(f"http://127.0.0.1:{run.ports['front']}", run.secret)


def in_flight(run: Run) -> int:
    return sum(each["in_flight"] for each in asyncio.run(client_of(run).instances()))


@pytest.fixture
def routed(launch: Callable[..., Run], tmp_path: Path) -> Callable[..., Run]:
    """Start engines behind a front."""

    def start(engines: dict[str, Options], **settings: Any) -> Run:
        secret_file = tmp_path / "secret"
        if not secret_file.exists():
            make_secret_file(str(secret_file))

        def command(ports: dict[str, int]) -> list[str]:
            told = [
                f"--engine={name},http://127.0.0.1:{ports[name]}"
                for name in engines
                if name not in settings.get("apart", ())
            ]
            own = [f"--port={ports['front']}", f"--secret-file={secret_file}"]
            return [str(HERE / "front.py"), *own, *told]

        secret = secret_file.read_text().strip()
        return launch({**engines, "front": command}, **{"secret": secret, **settings})

    return start


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(
        servers: dict[str, Options],
        *,
        popen: dict[str, Any] | None = None,
        specs: dict[str, dict[str, Any]] | None = None,
        drain_s: float = 30.0,
        secret: str = "0" * 64,
        as_json: bool = False,
        joins: Sequence[str] = (),
        apart: Sequence[str] = (),
        pauses_s: tuple[float, float] = (1.0, 30.0),
        note_every_s: float = 3.0,
        drain_margin_s: float = 5.0,
        until: str = "ready:",
        **launch: Any,
    ) -> Run:
        """Start a topology, and return when it says ``until``.

        ``specs`` are further fields of processes, by their names, ``joins`` the fronts that all
        join, ``apart`` those that join the launcher's own, ``pauses_s`` the shortest and the
        longest before a restart, ``note_every_s`` the time between two looks at shared
        memory, ``drain_margin_s`` what a front has beyond ``drain_s``, all others keys of
        ``launch``.
        """
        launch = {"stop_grace_s": 2.0, **launch}
        settings = {"drain_s": drain_s, "secret": secret, "as_json": as_json}
        settings |= {"joins": joins, "apart": apart, "pauses_s": pauses_s}
        settings |= {"note_every_s": note_every_s, "drain_margin_s": drain_margin_s}
        runs.append(Run(tmp_path, servers, launch, popen or {}, specs or {}, **settings))
        runs[-1].wait_for(until)
        return runs[-1]

    yield start
    for run in runs:
        run.close()
