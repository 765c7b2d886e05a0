"""The launcher in a container as Kubernetes runs one: see `tests.pod`."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epd_portable.config.secret import make_secret_file
from tests import pod

ROOT = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-m", "epd_portable.launch.cli")
FILE = ("--platform", "cpu", "--config", str(ROOT / "configs/1e1pd.yaml"))
DEADLINE_S = 60.0
FULL = pytest.mark.full
HOMES = {"none": {}, "root": {"HOME": "/"}, "read-only": {"HOME": "/usr"}, "gone": {"HOME": "/no"}}


@pytest.fixture(autouse=True)
def _allowed(tmp_path: Path) -> None:
    if why_not := pod.why_not(tmp_path / "tried"):
        pytest.skip(f"no such container here: {why_not}")


def run(beginning: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [*beginning, *COMMAND, *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.parametrize(
    "home", ["none", "read-only", *(pytest.param(name, marks=FULL) for name in ("root", "gone"))]
)
def test_processes_get_a_home_without_a_writable_one(tmp_path: Path, home: str) -> None:
    variables = variables_of_child(pod.enter(tmp_path / "tmp", **HOMES[home]))
    assert variables["LOGNAME"] == str(pod.USER)
    made = tmp_path / "tmp" / Path(variables["HOME"]).name
    assert variables["HOME"] == f"/tmp/{made.name}"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_models_of_a_home_that_is_read_only_are_found(tmp_path: Path) -> None:
    hub = tmp_path / "home/.cache/huggingface"
    hub.mkdir(parents=True)
    home = {"HOME": str(tmp_path / "home"), "TMPDIR": "/srv"}
    variables = variables_of_child(pod.enter(tmp_path / "tmp", place="/srv", **home))
    assert variables["HF_HOME"] == str(hub)
    assert variables["HOME"] == f"/srv/epd-home-{pod.USER}"


def variables_of_child(inside: list[str]) -> dict[str, str]:
    """Return the variables that the launcher gives a process there.

    `tests/e2e/front/test_front.py` starts real engines in such a container.
    """
    code = "import json, os; from epd_portable.launch.environment import child_environ as given; "
    command = [*inside, sys.executable, "-c", f"{code}print(json.dumps(given(os.environ)))"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 0, result.stderr
    found: dict[str, str] = json.loads(result.stdout)
    return found


def test_a_temporary_folder_elsewhere_is_used(tmp_path: Path) -> None:
    inside = pod.enter(tmp_path / "tmp", place="/srv", TMPDIR="/srv")
    result = run(inside, "plan", *FILE, "--json")
    assert result.returncode == 0, result.stderr
    processes: list[dict[str, Any]] = json.loads(result.stdout)["processes"]
    assert {each["env"]["TMPDIR"].rpartition("/")[0] for each in processes} == {"/srv"}


def test_missing_temporary_folder_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    result = run(pod.enter(tmp_path / "tmp", place="/srv"), "status")
    assert result.returncode == 2
    assert "no folder for temporary files can be written" in result.stderr
    assert "emptyDir at /tmp, or set TMPDIR" in result.stderr


def test_home_that_others_can_write_is_refused(tmp_path: Path) -> None:
    inside = pod.enter(tmp_path / "tmp")
    (tmp_path / "tmp" / f"epd-home-{pod.USER}").mkdir()
    (tmp_path / "tmp" / f"epd-home-{pod.USER}").chmod(0o777)
    make_secret_file(str(tmp_path / "tmp/epd.secret"))
    result = run(inside, "up", *FILE, "--set", "secret_file=/tmp/epd.secret")
    assert result.returncode == 2
    assert "mode 0777: others can write into it. Remove it, or set HOME" in result.stderr


def test_tilde_without_a_home_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    inside = pod.enter(tmp_path / "tmp")
    result = run(inside, "secret", "~/epd.secret")
    assert result.returncode == 2
    assert "~/epd.secret: user 12345 has no home directory. Set HOME" in result.stderr
