"""Processes that are forked from one that has imported what they need, under the supervisor."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from epd_benchmarks.load.start import _parts_of_topology
from epd_portable.launch.plan.processes import new_run_id
from epd_portable.launch.run import fork_server as fork_server_module
from epd_portable.launch.run.fork_server import ForkServer
from epd_portable.launch.run.process import Child, start_fork_server
from tests.integration.launch.conftest import Run, spec_of, until
from tests.integration.launch.test_update import drained

STAND_IN = "tests.integration.launch.stand_in"
PRELOAD = ("epd_portable.envs", "statistics")
TELLS = "tests.integration.launch.tells"


def stand_in(name: str) -> Callable[[dict[str, int]], list[str]]:
    return lambda ports: ["-m", STAND_IN, f"--port={ports[name]}"]


def forked(launch: Callable[..., Run], *, preload: Sequence[str] = PRELOAD) -> Run:
    """Start two instances that can be forked, behind a front that cannot."""
    names = ("encode-0", "encode-1")
    run = launch(
        {**{name: stand_in(name) for name in names}, "front": stand_in("front")},
        specs={name: {"preload": preload} for name in names},
    )
    return run


def fork_server(run: Run, name: str = "encode-0") -> int | None:
    """Return the pid of what a process was forked from."""
    process = psutil.Process(run.pid_of(name)).parent()
    assert process is not None
    return process.pid if fork_server_module.__name__ in process.cmdline() else None


def server_of(
    folder: Path, module: str, *words: str, env: dict[str, str], cores: Any = ()
) -> tuple[ForkServer, Callable[[], Child]]:
    """Return a fork server of its own, and what forks a process from it."""
    made = spec_of("-m", module, *words, env=env, cores=cores, preload=PRELOAD)
    root = str(Path(__file__).parents[3])
    settings: Any = {
        "log_dir": folder,
        "run_id": new_run_id(),
        "environ": {**os.environ, "PYTHONPATH": root},
    }
    server = start_fork_server([made], **settings)
    assert server is not None
    until(server.is_ready)
    return server, lambda: Child(made, **settings, fork_server=server)


def child_of(folder: Path, *words: str, **settings: Any) -> Child:
    """Fork one process from a fork server of its own."""
    server, fork = server_of(folder, *words, **settings)
    child = fork()
    until(lambda: child.exit_status() is not None)
    server.close()
    return child


def test_what_is_forked_is_the_process_that_its_command_names(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    child = child_of(
        tmp_path, TELLS, "a", "", "b c", env={"EPD_LOG_LEVEL": "ERROR"}, cores=[[core]]
    )
    assert child.exit_status() == 7
    said = ast.literal_eval(child.output())
    assert said == {
        "argv": ["a", "", "b c"],
        "shown": ["-m", TELLS, "a", "", "b c"],
        "level": "ERROR",
        "shown level": ["EPD_LOG_LEVEL=ERROR"],
        "room": False,
        "had": True,
        "stdin": "",
        "leads": True,
        "cores": [core],
        "pid": child.session,
        "main": TELLS,
        "sockets": 0,
    }


def test_its_end_by_a_signal_is_told(tmp_path: Path) -> None:
    child = child_of(tmp_path, TELLS, "kill", env={})
    assert child.exit_status() == -signal.SIGKILL


def test_what_is_ordered_in_vain_does_not_start_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fork_server_module, "_ANSWERS_WITHIN_S", 0.1)
        server, fork = server_of(tmp_path, TELLS, "a", env={})
    os.kill(server.pid, signal.SIGSTOP)
    child = fork()
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGCONT)
    until(lambda: child.exit_status() == 7)
    assert not ast.literal_eval(child.output())["had"], "it started by itself"
    until(server.has_ended)
    server.close()


def test_what_died_is_forked_again_and_nothing_is_left_of_a_killed_launcher(
    launch: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = forked(launch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    measured: Any = SimpleNamespace(pid=run.process.pid, url="http://127.0.0.1:1")
    assert {each.name: each.pid for each in _parts_of_topology(measured)} == {
        **{name: run.pid_of(name) for name in ("encode-0", "encode-1", "front")},
        "fork server": fork_server(run),
        "launcher": run.process.pid,
    }
    server, before = fork_server(run), run.pid_of("encode-1")
    assert server == fork_server(run, "encode-1") is not None
    assert fork_server(run, "front") is None
    os.kill(before, signal.SIGKILL)
    run.wait_for("encode-1 was killed by SIGKILL")
    run.wait_for("encode-1 is back")
    assert run.pid_of("encode-1") != before
    assert fork_server(run, "encode-1") == server
    run.process.kill()
    run.until(run.nothing_left, "the guard has ended everything")


def test_without_the_fork_server_processes_go_on_and_start_by_themselves(
    launch: Callable[..., Run],
) -> None:
    run = forked(launch)
    server, pid = fork_server(run), run.pid_of("encode-0")
    assert server is not None
    os.kill(server, signal.SIGKILL)
    assert run.ask("encode-0", "/metrics")
    os.kill(pid, signal.SIGTERM)
    run.wait_for("the fork server has ended: processes start by themselves")
    run.wait_for("encode-0 is back")
    assert fork_server(run) is None
    run.stop(signal.SIGINT)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param("no_such_module", marks=pytest.mark.full),
        "tests.integration.launch.starts_thread",
    ],
)
def test_what_cannot_be_imported_or_forked_starts_by_itself(
    launch: Callable[..., Run], module: str
) -> None:
    run = forked(launch, preload=(module,))
    assert any("the fork server has ended" in line for line in run.lines)
    assert module.rpartition(".")[2] in (run.log_dir / "fork-server.log").read_text()
    assert fork_server(run) is None


def test_an_update_runs_what_is_installed_then_also_of_what_is_alone_in_its_role(
    routed: Callable[..., Run],
) -> None:
    names = ("encode-0", "pd-0")
    specs = {"encode-0": {"preload": PRELOAD}}
    run = routed({name: stand_in(name) for name in names}, specs=specs)
    assert fork_server(run) is not None
    first = run.pid_of("pd-0")
    run.process.send_signal(signal.SIGHUP)
    run.wait_for("updated encode-0, pd-0")
    assert fork_server(run) is None
    assert run.pid_of("pd-0") != first
    assert drained(run) == [*names]
    # To be asked to end was no death.
    assert not any("restarting" in line for line in run.lines)
