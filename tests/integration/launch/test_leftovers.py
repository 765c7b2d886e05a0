"""Shared memory of processes that are killed."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd_portable.launch.run.sessions import mapped_files, remove_unused

MAPPER = """
import mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(descriptor, 4096)
memory = mmap.mmap(descriptor, 4096)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path() -> Iterator[Path]:
    file = Path("/dev/shm", f"test leftovers {uuid.uuid4().hex}")
    yield file
    file.unlink(missing_ok=True)


@pytest.fixture
def mapper(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", MAPPER, str(path)]
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        yield process
        process.kill()


def test_what_a_killed_process_mapped_is_removed(
    path: Path, mapper: subprocess.Popen[bytes]
) -> None:
    files = mapped_files([mapper.pid])
    assert files == {path}
    remove_unused(files, since=0)
    assert path.exists()
    mapper.kill()
    mapper.wait()
    remove_unused(files, since=0)
    assert not path.exists()
    assert mapped_files([mapper.pid]) == set()


def test_a_semaphore_is_found_under_the_name_that_it_was_given() -> None:
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    name = semaphore._semlock.name.removeprefix("/")  # type: ignore[attr-defined]
    assert Path("/dev/shm", f"sem.{name}") in mapped_files([os.getpid()])


def test_what_is_older_than_the_run_is_left_alone(path: Path) -> None:
    path.touch()
    remove_unused({path}, since=time.time() + 60)
    assert path.exists()
