"""What `make env PLATFORM=cuda` looks at before it fetches anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ci import cuda_env, make_env
from ci.venv import EnvironmentSetupError


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of commands: those of a machine that has nothing of NVIDIA's."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(cuda_env, "KERNEL_MODULE", tmp_path / "version")
    monkeypatch.setattr(cuda_env, "NVCC_PLACES", ("nvcc",))
    return tmp_path


def command(folder: Path, name: str, prints: str = "", status: int = 0) -> None:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\necho '{prints}'\nexit {status}\n")
    file.chmod(0o755)


def test_a_machine_without_anything_is_warned_and_not_refused(machine: Path) -> None:
    driver, compiler = cuda_env.check()
    assert driver.startswith("no NVIDIA driver is seen here")
    assert "VLLM_USE_FLASHINFER_SAMPLER=0" in compiler
    command(machine, "nvidia-smi", "580.65.06")
    command(machine, "nvcc")
    assert cuda_env.check() == []


def test_a_driver_that_is_too_old_is_refused_before_anything_is_made(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(machine, "nvidia-smi", "575.57.08")

    def never(*_: object) -> None:
        raise AssertionError("something was made")

    monkeypatch.setattr(make_env, "_make", never)
    with pytest.raises(EnvironmentSetupError, match=r"driver is 575\.57\.08.*needs 580"):
        make_env.make("cuda")


def test_a_python_that_the_engine_does_not_know_is_refused(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 15, 0, "final", 0))
    with pytest.raises(EnvironmentSetupError, match=r"Python 3\.11 to 3\.14, this is 3\.15"):
        cuda_env.check()


def test_the_engine_is_pinned_beside_the_package(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(make_env, "_make", lambda *given: made.append(given))
    for target in ("cuda", "npu"):
        make_env.make(target)
    assert [given[1:4] for given in made] == [
        ("cuda,kv,mooncake,dev", [], ["vllm==0.32.0"]),
        ("npu,dev", [], []),
    ]
