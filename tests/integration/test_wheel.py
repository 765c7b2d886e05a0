"""Content of the wheel, as a user installs it."""

from __future__ import annotations

import configparser
import sys
import zipfile
from pathlib import Path

import pytest

from tests.kit.commands import ROOT, run


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from the tracked files alone."""
    folder = tmp_path_factory.mktemp("wheel")
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    for built in (
        run("git", "checkout-index", "--all", f"--prefix={folder / 'source'}/"),
        run(*pip_wheel, "--no-build-isolation", "--wheel-dir", folder, folder / "source"),
    ):
        assert built.returncode == 0, built.stderr[-2000:]
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_has_the_package_once_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "epd_portable",
        "epd_benchmarks",
    }
    assert "epd_portable/py.typed" in wheel.namelist()


def test_wheel_has_topologies_and_profiles(wheel: zipfile.ZipFile) -> None:
    folder = "epd_portable/configs/"
    there = {name for name in wheel.namelist() if name.startswith(folder)}
    files = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    assert there == {f"{folder}{path.as_posix()}" for path in files}
    for path in files:
        name = f"{folder}{path.as_posix()}"
        assert wheel.read(name) == (ROOT / "configs" / path).read_bytes()


def test_wheel_has_the_demo_model(wheel: zipfile.ZipFile) -> None:
    model = {
        name: wheel.getinfo(name).file_size
        for name in wheel.namelist()
        if name.startswith("epd_portable/demo/model/")
    }
    assert "epd_portable/demo/model/config.json" in model
    assert any(name.endswith(".safetensors") for name in model)
    assert sum(model.values()) <= 3_000_000


def test_entry_points_of_the_wheel_exist(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(name).decode())
    assert set(parser["console_scripts"]) == {"epd-launch", "epd-bench"}
    assert set(parser["vllm.general_plugins"]) == {"epd_portable"}
    for section in parser.sections():
        for target in parser[section].values():
            module = target.partition(":")[0].replace(".", "/")
            assert f"{module}.py" in wheel.namelist(), target


def test_installed_launcher_plans_from_another_folder(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    installed, away = tmp_path / "installed", tmp_path / "away"
    away.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    assert run(*install, "--target", installed, wheel.filename).returncode == 0
    plan = [installed / "bin/epd-launch", "plan", "--platform", "cpu"]
    planned = run(*plan, "--config", "configs/1e1pd.yaml", cwd=away, PYTHONPATH=str(installed))
    assert planned.returncode == 0, planned.stderr
    assert f"--model {installed / 'epd_portable/demo/model'}" in planned.stdout
