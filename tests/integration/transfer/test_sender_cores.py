"""Cores of the encode worker's threads, and their number, when OpenMP binds its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MANY = len(os.sched_getaffinity(0)) > 1
PROGRAM = """
import os, threading
import torch
from epd_portable.transfer.copies import CHUNK_BYTES, DeviceCopies
from epd_portable.platforms import registry
from tests.kit.encode_side import make_sender

def tasks():
    return {int(task) for task in os.listdir("/proc/self/task")}

allowed = set(map(int, os.environ["GOMP_CPU_AFFINITY"].split()))
bound = os.sched_getaffinity(0)
assert len(bound) == 1, bound
before = tasks()
torch.zeros(1 << 20).add_(1)
team = tasks() - before
sender = make_sender("shm")
assert os.sched_getaffinity(0) == bound
mine = tasks() - before - team
assert len(mine) >= 6, "the sender, four writers, and ZMQ's own"
assert {frozenset(os.sched_getaffinity(task)) for task in mine} == {frozenset(allowed)}

def write():
    copies = DeviceCopies(registry.get("cpu"))
    src = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    src[-1] = 7
    target = torch.empty_like(src)
    done = copies.platform.record_event()
    before = tasks()
    copies.write(target, src, after=done, deadline_s=copies.clock() + 60)
    assert tasks() <= before, "a team of threads was started for a copy"
    assert target[-1] == 7

thread = threading.Thread(target=write)
failed = []
threading.excepthook = failed.append
thread.start()
thread.join()
assert not failed, failed
sender.close()
print("ok")
"""


@pytest.mark.skipif(not MANY, reason="one core: nothing can be bound to a part of the cores")
def test_sender_threads_use_all_cores_under_openmp_binding() -> None:
    cores = " ".join(map(str, sorted(os.sched_getaffinity(0))))
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "GOMP_CPU_AFFINITY": cores, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.stdout.strip() == "ok", ended.stderr
