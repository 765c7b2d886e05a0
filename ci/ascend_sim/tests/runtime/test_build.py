"""The build of the simulated runtime."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

RUNTIME = Path(__file__).parents[2] / "runtime"
MOST_LINES = 400
NAMES = {
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
    "libascend_sim.so",
    "libascendcl.so",
    "libge_runner.so",
    "libgraph.so",
    "libhccl.so",
    "libnnopbase.so",
    "libopapi.so",
}


def build(folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(RUNTIME / "build.sh"), str(folder)],
        env=os.environ | {"PYTHON": python},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_runtime_builds_without_warnings_under_all_names(tmp_path: Path) -> None:
    done = build(tmp_path / "made", sys.executable)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {path.name for path in (tmp_path / "made").iterdir()} == NAMES
    assert len({path.resolve() for path in (tmp_path / "made").iterdir()}) == 1


def test_interpreter_without_torch_npu_is_refused_with_remedy(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(bare.stat().st_mode | stat.S_IXUSR)

    done = build(tmp_path / "made", str(bare))

    assert done.returncode != 0
    assert "no torch_npu" in done.stderr
    assert "set PYTHON" in done.stderr


def test_runtime_files_stay_short() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in RUNTIME.iterdir()}

    assert max(lines.values()) <= MOST_LINES, lines
