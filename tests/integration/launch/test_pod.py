"""The launcher in a container as Kubernetes runs one: see `tests.pod`."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epd_portable.config.secret import make_secret_file
from epd_portable.demo.servers import free_port
from tests import pod

ROOT = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-m", "epd_portable.launch.cli")
FILE = ("--platform", "cpu", "--config", str(ROOT / "configs/1e1pd.yaml"))
ROUTER_ALONE = (
    *("up", *FILE),
    *("--set", "instances.encode.count=0", "--set", "instances.prefill_decode.count=0"),
)
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
def test_launcher_serves_without_a_writable_home(tmp_path: Path, home: str) -> None:
    variables = served(pod.enter(tmp_path / "tmp", **HOMES[home]), tmp_path / "tmp", "/tmp")
    assert variables["LOGNAME"] == str(pod.USER)
    made = tmp_path / "tmp" / Path(variables["HOME"]).name
    assert variables["HOME"] == f"/tmp/{made.name}"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_models_of_a_home_that_is_read_only_are_found(tmp_path: Path) -> None:
    hub = tmp_path / "home/.cache/huggingface"
    hub.mkdir(parents=True)
    home = {"HOME": str(tmp_path / "home"), "TMPDIR": "/srv"}
    inside = pod.enter(tmp_path / "tmp", place="/srv", **home)
    variables = served(inside, tmp_path / "tmp", "/srv")
    assert variables["HF_HOME"] == str(hub)
    assert variables["HOME"] == f"/srv/epd-home-{pod.USER}"


def served(inside: list[str], folder: Path, place: str) -> dict[str, str]:
    """Start a router there, which serves and ends; return the variables of its process."""
    port = free_port()
    make_secret_file(str(folder / "epd.secret"))
    secret = ("--set", f"secret_file={place}/epd.secret")
    command = [*inside, *COMMAND, *ROUTER_ALONE, *secret, "--port", str(port), "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        try:
            lines = map(json.loads, launcher.stdout)
            found = next(each for each in lines if each["event"] in ("ready", "error"))
            assert found["event"] == "ready", found
            [shown] = json.loads(run(inside, "status", "--json").stdout)["runs"]
            assert shown["url"] == f"http://127.0.0.1:{port}/v1"
            [router] = shown["processes"]
            return environment(router["pid"])
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.stdout.read()
            assert launcher.wait(DEADLINE_S) == 0


def environment(pid: int) -> dict[str, str]:
    """Return the variables of a process."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


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
    result = run(inside, *ROUTER_ALONE, "--set", "secret_file=/tmp/epd.secret")
    assert result.returncode == 2
    assert "mode 0777: others can write into it. Remove it, or set HOME" in result.stderr


def test_tilde_without_a_home_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    inside = pod.enter(tmp_path / "tmp")
    result = run(inside, "secret", "~/epd.secret")
    assert result.returncode == 2
    assert "~/epd.secret: user 12345 has no home directory. Set HOME" in result.stderr
