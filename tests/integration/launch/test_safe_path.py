"""Files in the working directory that are named like modules: nobody imports them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from epd_portable.config.instance import PlatformName
from epd_portable.errors import LaunchError, PlatformUnavailableError
from epd_portable.launch.environment import child_environ, new_run_id
from epd_portable.launch.plan import machine
from epd_portable.launch.run.guard import Guard
from epd_portable.launch.run.lifecycle import Child
from epd_portable.platforms.traits import TRAITS
from tests.integration.launch.conftest import child_of

ROOT = str(Path(__file__).resolve().parents[3])
HOSTILE = ("argparse", "click", "httpx", "multiprocessing", "pathlib", "pydantic", "torch", "yaml")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which somebody has left files."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in HOSTILE:
        code = f"open({str(tmp_path)!r} + '/ran-{name}', 'w'); raise SystemExit(9)\n"
        (folder / f"{name}.py").write_text(code)
    monkeypatch.chdir(folder)
    # With an empty element, as set_env.sh of CANN and many others leave it.
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path


def ran(here: Path) -> list[str]:
    return sorted(path.name for path in here.glob("ran-*"))


def start(here: Path, *argv: str, **env: str) -> Child:
    child = child_of(here, *argv, env=env)
    assert child._process.wait(60) is not None
    return child


def test_the_files_would_run_otherwise(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ROOT)
    subprocess.run([sys.executable, "-c", "import httpx"], check=False)
    assert ran(here) == ["ran-httpx"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python starts them in a safe folder")
def test_grandchild_imports_no_file_of_the_folder(here: Path) -> None:
    """The grandchildren are vLLM's: a spawned process, and a python with a command."""
    code = (
        "import multiprocessing, os, subprocess, sys\n"
        "process = multiprocessing.get_context('spawn').Process(target=print, args=('spawned',))\n"
        "process.start()\n"
        "process.join()\n"
        "subprocess.run([sys.executable, '-c', 'import httpx; print(httpx.__version__)'])\n"
    )
    child = start(here, "-c", code, PYTHONPATH=f":{ROOT}")
    assert ran(here) == []
    assert child.output().splitlines()[0] == "spawned"
    assert child.exit_status() == 0, child.output()


@pytest.mark.parametrize("platform", ["cuda", pytest.param("npu", marks=pytest.mark.full)])
def test_device_count_imports_no_file_of_the_folder(here: Path, platform: PlatformName) -> None:
    with pytest.raises((PlatformUnavailableError, LaunchError)):
        machine.probed_machine(TRAITS[platform], os.environ)
    assert ran(here) == []


def test_the_guard_imports_none(here: Path) -> None:
    (here / "temp").mkdir()
    run_id = new_run_id()
    guard = Guard(
        run_id=run_id,
        temp_dir=here / "temp",
        grace_s=1.0,
        log=here / "guard.log",
    )
    guard.close(timeout_s=30.0)
    assert (here / "guard.log").read_text() == ""
    assert not (here / "temp").exists()
    assert ran(here) == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python itself imports some of them")
@pytest.mark.parametrize(
    "words",
    [
        ("-m", "epd_portable.launch.cli", "--version"),
        pytest.param(("-P", "-m", "epd_portable.launch.cli", "--version"), marks=pytest.mark.full),
    ],
)
def test_the_commands_import_none_when_they_are_run_by_module(
    here: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PYTHONPATH", ROOT)
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ran(here) == []


def test_another_program_that_imports_the_package_keeps_its_path(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ROOT)
    Path("theirs").mkdir()
    Path("theirs/__init__.py").write_text("import epd_portable\n")
    Path("theirs/main.py").write_text("import sys; print(sys.path[0])\n")
    done = subprocess.run(
        [sys.executable, "-m", "theirs.main"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == os.getcwd()


def test_pythonpath_retains_the_folders_that_it_names() -> None:
    plain = child_environ({"A": "b"})
    assert (plain["A"], plain["PYTHONSAFEPATH"]) == ("b", "1") and "PYTHONPATH" not in plain
    assert child_environ({"PYTHONPATH": ":/x::.:"})["PYTHONPATH"] == f"/x:{os.getcwd()}"
    assert "PYTHONPATH" not in child_environ({"PYTHONPATH": ":", "PYTHONSAFEPATH": ""})
