from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from epd_portable.bench import cpu_time

BUSY = "import sys, time\nwhile time.process_time() < {}: pass\nprint(flush=True)\nsys.stdin.read()"
LAUNCHER = """
import subprocess, sys
inner = [sys.executable, "-c", sys.argv[1]]
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
instances = [subprocess.Popen(inner, **pipes) for _ in range(2)]
for instance in instances:
    instance.stdout.readline()
print(flush=True)
sys.stdin.read()
"""


def started(*argv: str) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    yield process.pid
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


@pytest.fixture
def launcher() -> Iterator[int]:
    yield from started(LAUNCHER, BUSY.format(0.3))


@pytest.fixture
def engine() -> Iterator[int]:
    yield from started(BUSY.format(0.3))


def test_everything_that_a_process_started_counts(launcher: int) -> None:
    root = psutil.Process(launcher)
    instances = [cpu_time.own_s(child) for child in root.children()]
    assert len(instances) == 2
    assert all(used_s > 0.25 for used_s in instances)
    assert cpu_time.tree_s(launcher) >= sum(instances)


def test_of_one_process_everything_is_its_own(engine: int) -> None:
    assert cpu_time.tree_s(engine) > 0.25


def test_a_process_that_is_gone_has_used_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        seen = psutil.Process(gone.pid)
    assert cpu_time.own_s(seen) == 0
