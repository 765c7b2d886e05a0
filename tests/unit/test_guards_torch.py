"""Imports: the launcher and decisions load without torch, no package loads by two names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.kit.commands import run

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
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
        importlib.import_module(found.name)
"""


@pytest.mark.parametrize(("modules", "failure"), [(WITHOUT_TORCH, ""), (["torch"], "halted")])
def test_modules_import_where_torch_is_absent(modules: list[str], failure: str) -> None:
    argv = [sys.executable, "-c", IMPORT_EVERYTHING, *modules]
    result = run(*argv)
    assert bool(result.returncode) == bool(failure), result.stderr
    assert failure in result.stderr


# Links at the top of the repository, and the one name behind them.

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
