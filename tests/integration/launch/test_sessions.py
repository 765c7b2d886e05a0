"""Ending real processes: what they leave in shared memory goes too."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

from epd_portable.launch.run import sessions

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


def start(code: str, **env: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **env},
    )
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    process.stdout.close()
    return process, line


def test_shared_memory_of_a_killed_process_is_removed_by_its_tracker() -> None:
    process, name = start(OWNER)
    path = Path("/dev/shm", name)
    assert path.exists()
    left = sessions.end_processes([process.pid], None, grace_s=0.2, reap=process.poll)
    assert left == []
    assert process.wait(10) == -signal.SIGKILL
    assert not path.exists()


def test_a_process_that_left_its_session_is_found_by_the_run() -> None:
    run_id = secrets.token_hex(4)
    process, _ = start(AWAY, EPD_RUN_ID=run_id)
    assert process.wait(10) == 0
    assert sessions.members([process.pid], None) == []
    assert len(sessions.members([process.pid], run_id)) == 1
    assert sessions.end_processes([process.pid], run_id, grace_s=5.0) == []
    assert sessions.members([], run_id) == []


def test_processes_of_another_run_are_left_alone() -> None:
    other = secrets.token_hex(4)
    process, _ = start(OWNER, EPD_RUN_ID=other)
    try:
        assert sessions.end_processes([], secrets.token_hex(4), grace_s=0.0) == []
        assert process.poll() is None
    finally:
        sessions.end_processes([], other, grace_s=0.0, reap=process.poll)
