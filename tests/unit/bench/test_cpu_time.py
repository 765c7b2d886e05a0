from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from epd_portable.bench import cpu_time

BUSY = "import sys, time\nwhile time.process_time() < {}: pass\nprint(flush=True)\nsys.stdin.read()"
LAUNCHER = """
import subprocess, sys
inner = [sys.executable, "-c", sys.argv[1]]
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
roles = ['{"ec_role": "ec_consumer"}', '{"ec_role": "ec_producer"}']
instances = [subprocess.Popen([*inner, role], **pipes) for role in roles]
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


def test_of_a_topology_the_prefill_decode_instances_are_told_from_the_rest(launcher: int) -> None:
    used = cpu_time.read(launcher)
    assert 0.25 < used.prefill_decode_s < used.whole_s - 0.25


def test_of_one_process_everything_is_its_own(engine: int) -> None:
    used = cpu_time.read(engine)
    assert used.prefill_decode_s == used.whole_s > 0.25


def test_what_was_used_is_a_difference_and_shared_among_those_who_used_it() -> None:
    before = cpu_time.CpuTime(prefill_decode_s=1.0, whole_s=2.0)
    after = cpu_time.CpuTime(prefill_decode_s=2.0, whole_s=6.0)
    assert (after - before).shared(2) == cpu_time.CpuTime(prefill_decode_s=0.5, whole_s=2.0)
