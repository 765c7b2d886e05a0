"""The decisions of ci/make_env.py; installing itself is what `make env` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ci import make_env

CPU_TORCH = 'torch==2.13.0+cpu; platform_machine == "x86_64"'


class FakePip:
    """Answers dry_run() from a table of what the index holds, and notes what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, torch: str | None) -> None:
        self.asked: list[list[str]] = []
        self.torch = torch
        monkeypatch.setattr(make_env, "dry_run", self.dry_run)

    def dry_run(self, requirements: list[str]) -> list[dict[str, Any]] | None:
        self.asked.append(requirements)
        if requirements == ["engine==1"]:
            needs = ["numpy", CPU_TORCH, "torchvision", "torch-extra==2"]
            return [{"name": "engine", "version": "1", "requires_dist": needs}]
        return None if self.torch is None else [{"name": "torch", "version": self.torch}]


def test_a_pip_that_knows_the_cpu_build_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(monkeypatch, torch="2.13.0+cpu")
    assert not make_env.needs_cpu_index(["engine==1"])
    assert pip.asked == [["engine==1"], [CPU_TORCH]]


@pytest.mark.parametrize("torch", [None, "2.13.0", "2.13.0+cu130"])
def test_the_cpu_index_is_added_when_pip_finds_no_torch_or_another_build(
    monkeypatch: pytest.MonkeyPatch, torch: str | None
) -> None:
    FakePip(monkeypatch, torch)
    assert make_env.needs_cpu_index(["engine==1"])


def test_an_engine_that_pip_cannot_find_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, torch=None)
    with pytest.raises(make_env.EnvironmentSetupError, match="no engine==9 for Python"):
        make_env.needs_cpu_index(["engine==9"])


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a pyproject.toml and a complete environment for the CPU."""
    monkeypatch.setattr(make_env, "ROOT", tmp_path)
    monkeypatch.setattr(make_env, "VENV_PYTHON", tmp_path / "python")
    monkeypatch.setattr(make_env, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(make_env, "LOG", tmp_path / "log")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "python").touch()
    (tmp_path / "stamp").write_text(make_env.fingerprint("cpu"))
    return tmp_path


def test_a_complete_environment_is_reused(checkout: Path) -> None:
    assert make_env.is_current(make_env.fingerprint("cpu"))


def test_another_pyproject_platform_or_a_lost_interpreter_makes_it_anew(checkout: Path) -> None:
    assert not make_env.is_current(make_env.fingerprint("cuda"))
    (checkout / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert not make_env.is_current(make_env.fingerprint("cpu"))
    (checkout / "pyproject.toml").write_text("[project]\n")
    (checkout / "python").unlink()
    assert not make_env.is_current(make_env.fingerprint("cpu"))


@pytest.mark.parametrize(
    ("log", "step"),
    [
        ("", "starting"),
        ("Collecting torch\n  Downloading torch.whl (1 MB)\n", "Downloading torch.whl (1 MB)"),
        ("Installing collected packages: a, b, c\n", "Installing 3 packages"),
    ],
)
def test_progress_shows_what_pip_does_last(checkout: Path, log: str, step: str) -> None:
    (checkout / "log").write_text(log)
    assert make_env.last_step() == step


def test_a_failed_step_ends_with_the_log(checkout: Path) -> None:
    with pytest.raises(make_env.EnvironmentSetupError, match=r"(?s)status 3.*no such wheel"):
        make_env.run_logged(["sh", "-c", "echo no such wheel; exit 3"], "installing")
