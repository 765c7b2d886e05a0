"""The router, the launcher and what they share start on a machine that has no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT_TORCH = [
    "epd_portable.config",
    "epd_portable.envs",
    "epd_portable.errors",
    "epd_portable.launch",
    "epd_portable.log",
    "epd_portable.router",
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
