"""Processes of a plan: their cores, what they said, their end, and the shared memory they leave."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from epd_portable.launch.run import sessions
from epd_portable.launch.run.sessions import mapped_files, remove_unused
from tests.integration.launch.conftest import DEADLINE_S, child_of
from tests.servers import serving
from tests.waiting import until

SHOWS_CORES = """
import os, subprocess, sys
print(sorted(os.sched_getaffinity(0)), flush=True)
child = "import os; print(sorted(os.sched_getaffinity(0)))"
subprocess.run([sys.executable, "-c", child], check=True)
"""
WAITS = """
import pathlib, time
print("before", flush=True)
while not pathlib.Path("%s").exists():
    time.sleep(0.01)
print("after", flush=True)
"""
OWNER = """
import multiprocessing.shared_memory, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
block = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
print(block.name, flush=True)
time.sleep(600)
"""
AWAY = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("started", flush=True)
"""
MAPPER = """
import mmap, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(descriptor, 4096)
memory = mmap.mmap(descriptor, 4096)
print("mapped", flush=True)
time.sleep(600)
"""


def said_by(folder: Path, **spec: object) -> list[str]:
    child = child_of(folder, "-c", SHOWS_CORES, **spec)
    until(lambda: child.exit_status() is not None)
    assert child.exit_status() == 0, child.output()
    return child.output().splitlines()


def start(code: str, *words: str, **env: str) -> tuple[subprocess.Popen[str], str]:
    """Return a process of a session of its own, and the line that it writes."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **env},
    )
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    process.stdout.close()
    return process, line


def test_instance_keeps_to_its_cores_and_launcher_to_its_own(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core only")
    first, second, *_ = sorted(before)
    assert said_by(tmp_path, cores=((second,),)) == [f"[{second}]"] * 2
    assert os.sched_getaffinity(0) == before
    # Each rank has its own; the engine and the API server may use all of them.
    assert said_by(tmp_path, cores=((first,), (second,))) == [f"[{first}, {second}]"] * 2
    assert said_by(tmp_path) == [str(sorted(before))] * 2


def test_unremovable_shared_memory_does_not_end_the_launcher(
    tmp_path: Path,
) -> None:
    """The instance cannot make its pool then, and says so; others go on."""
    squatted = sessions.SHM / f"epd-test-{uuid.uuid4().hex}"
    squatted.mkdir()
    try:
        assert len(said_by(tmp_path, shm_name=squatted.name)) == 2
    finally:
        squatted.rmdir()


def test_output_since_start_is_found_after_log_truncation(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_bytes(b"of an earlier start\n" * 10)
    child = child_of(tmp_path, "-c", WAITS % (tmp_path / "go"))
    until(lambda: child.output() == "before\n")
    os.truncate(tmp_path / "x.log", 0)
    (tmp_path / "go").touch()
    until(lambda: child.exit_status() is not None)
    assert child.output() == "after\n"


def test_tracker_removes_shared_memory_of_a_killed_process() -> None:
    process, name = start(OWNER)
    path = Path("/dev/shm", name)
    assert path.exists()
    assert sessions.end_processes([process.pid], None, grace_s=0.2) == []
    assert process.wait(10) == -signal.SIGKILL
    assert not path.exists()


def test_process_outside_its_session_is_found_by_its_run() -> None:
    run_id, other = secrets.token_hex(4), secrets.token_hex(4)
    bystander, _ = start(OWNER, EPD_RUN_ID=other)
    process, _ = start(AWAY, EPD_RUN_ID=run_id)
    try:
        assert process.wait(10) == 0
        assert sessions.members([process.pid], None) == {}
        assert len(sessions.members([process.pid], run_id)) == 1
        assert sessions.end_processes([process.pid], run_id, grace_s=5.0) == []
        assert sessions.members([], run_id) == {}
        assert bystander.poll() is None
    finally:
        sessions.end_processes([], other, grace_s=0.0)
        bystander.wait(10)


@pytest.fixture
def path() -> Iterator[Path]:
    file = Path("/dev/shm", f"test leftovers {uuid.uuid4().hex}")
    yield file
    file.unlink(missing_ok=True)


def test_shared_memory_of_a_killed_process_is_removed(
    path: Path,
) -> None:
    mapper, line = start(MAPPER, str(path))
    assert line == "mapped"
    files = mapped_files([mapper.pid])
    assert files == {path}
    remove_unused(files, since=0)
    assert path.exists()
    mapper.kill()
    mapper.wait()
    remove_unused(files, since=time.time() + 60)
    assert path.exists()
    remove_unused(files, since=0)
    assert not path.exists()
    assert mapped_files([mapper.pid]) == set()


def test_a_semaphore_is_found_under_the_name_that_it_was_given() -> None:
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    name = semaphore._semlock.name.removeprefix("/")  # type: ignore[attr-defined]
    assert Path("/dev/shm", f"sem.{name}") in mapped_files([os.getpid()])


def test_unresponsive_engine_is_unhealthy_despite_silent_front(
    tmp_path: Path,
) -> None:
    asked: list[float] = []

    class Front(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(float(self.path.partition("?within_s=")[2] or "nan"))
            if not silent:
                self.send_response(status)
                self.end_headers()

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Front)) as url:
        alone, engine = (
            child_of(tmp_path, "-c", "", url=url + path) for path in ("", "/epd/instances/encode-0")
        )
        until(lambda: None not in (alone.exit_status(), engine.exit_status()))
        silent, status = False, 500
        assert not asyncio.run(alone.is_well(timeout_s=DEADLINE_S))
        status = 503
        assert not asyncio.run(alone.is_well(timeout_s=DEADLINE_S))
        asked.clear()
        assert not asyncio.run(engine.is_well(timeout_s=DEADLINE_S))
        silent = True
        assert asyncio.run(engine.is_well(timeout_s=0.5))
    # The front answers while the launcher still listens.
    assert len(asked) == 2
    assert 0 < asked[0] < DEADLINE_S and 0 < asked[1] < 0.5
