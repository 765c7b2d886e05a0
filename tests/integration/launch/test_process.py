"""One process of a plan: the cores that it and all that it starts run on, and its shared memory."""

from __future__ import annotations

import os
import sys
import time
import uuid
from pathlib import Path

import pytest

from epd_portable.launch.plan.processes import ProcessSpec, new_run_id
from epd_portable.launch.run import sessions
from epd_portable.launch.run.log_files import rotate
from epd_portable.launch.run.process import Child

DEADLINE_S = 30.0
CODE = """
import os, subprocess, sys
print(sorted(os.sched_getaffinity(0)), flush=True)
child = "import os; print(sorted(os.sched_getaffinity(0)))"
subprocess.run([sys.executable, "-c", child], check=True)
"""


def said_by(folder: Path, cores: tuple[tuple[int, ...], ...], shm_name: str = "") -> list[str]:
    spec = ProcessSpec(
        name="encode-0",
        role="encode",
        argv=(sys.executable, "-c", CODE),
        env={},
        url="http://127.0.0.1:1",
        ports={},
        cores=cores,
        shm_name=shm_name,
    )
    child = Child(spec, log_dir=folder, run_id=new_run_id(), environ=os.environ)
    end_s = time.monotonic() + DEADLINE_S
    while child.exit_status() is None and time.monotonic() < end_s:
        time.sleep(0.01)
    assert child.exit_status() == 0, child.output()
    return child.output().splitlines()


def test_an_instance_keeps_to_its_cores_and_the_launcher_to_its_own(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core only")
    first, second, *_ = sorted(before)
    assert said_by(tmp_path, ((second,),)) == [f"[{second}]"] * 2
    assert os.sched_getaffinity(0) == before
    # Each rank has its own; the engine and the API server may use all of them.
    (tmp_path / "encode-0.log").unlink()
    assert said_by(tmp_path, ((first,), (second,))) == [f"[{first}, {second}]"] * 2


def test_an_instance_without_cores_of_its_own_may_use_all(tmp_path: Path) -> None:
    assert said_by(tmp_path, ()) == [str(sorted(os.sched_getaffinity(0)))] * 2


def test_what_has_the_name_of_its_shared_memory_and_cannot_be_removed_ends_no_launcher(
    tmp_path: Path,
) -> None:
    """The instance cannot make its pool then, and says so; others go on."""
    squatted = sessions.SHM / f"epd-test-{uuid.uuid4().hex}"
    squatted.mkdir()
    try:
        assert len(said_by(tmp_path, (), squatted.name)) == 2
    finally:
        squatted.rmdir()


WAITS = """
import pathlib, time
print("before", flush=True)
while not pathlib.Path("%s").exists():
    time.sleep(0.01)
print("after", flush=True)
"""


def test_what_a_process_said_since_its_start_is_found_after_its_log_was_cut(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_bytes(b"of an earlier start\n" * 10)
    code = WAITS % (tmp_path / "go")
    argv = (sys.executable, "-c", code)
    spec = ProcessSpec(name="x", role="encode", argv=argv, env={}, url="http://x", ports={})
    child = Child(spec, log_dir=tmp_path, run_id=new_run_id(), environ=os.environ)
    end_s = time.monotonic() + DEADLINE_S
    while not child.output():
        assert time.monotonic() < end_s
    assert child.output() == "before\n"
    rotate(tmp_path / "x.log", max_bytes=1, files=2)
    (tmp_path / "go").touch()
    while child.exit_status() is None:
        assert time.monotonic() < end_s
    assert child.output() == "after\n"
