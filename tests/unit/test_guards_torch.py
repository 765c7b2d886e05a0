"""Imports: the launcher and decisions load without torch, no package loads by two names."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_TORCH = [
    "epd_portable.config",
    "epd_portable.envs",
    "epd_portable.errors",
    "epd_portable.launch",
    "epd_portable.log",
    "epd_portable.placement",
    "epd_portable.wire",
]

# None in sys.modules makes an import of that name fail, as if it were not installed.
IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
for absent in ("torch", "torch_npu", "vllm", "transformers", "numpy"):
    sys.modules[absent] = None
module = importlib.import_module(sys.argv[1])
for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
    importlib.import_module(found.name)
"""


def failure_of(code: str, *words: str) -> str:
    argv = [sys.executable, "-c", code, *words]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return result.stderr if result.returncode else ""


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_module_and_its_submodules_import_where_torch_is_absent(module: str) -> None:
    assert failure_of(IMPORT_EVERYTHING, module) == ""


def test_the_probe_notices_an_import_of_torch() -> None:
    assert "ModuleNotFoundError" in failure_of(IMPORT_EVERYTHING, "torch")


# -- links at the top of the repository, and the one name behind them ------------------------------

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["platforms", "runners"])
def test_link_at_top_points_into_package_and_survives_clone(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("epd_portable", name)
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("name", ["platforms", "runners"])
def test_a_linked_package_refuses_its_second_name(name: str) -> None:
    with pytest.raises(ImportError, match=f"epd_portable.{name}"):
        importlib.import_module(name)
