"""Tiny checkpoints with random weights, one for each kind of model that the tests serve.

Everything is made on the spot from a small configuration: nothing is downloaded. Two calls give the
same files.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

_BUILDERS = {
    "qwen2_vl": "tests.checkpoints.qwen_vl:build_qwen2_vl",
    "qwen2_5_vl": "tests.checkpoints.qwen_vl:build_qwen2_5_vl",
    "qwen3_vl": "tests.checkpoints.qwen_vl:build_qwen3_vl",
    "llava_next": "tests.checkpoints.llava_next:build",
    "llava_onevision": "tests.checkpoints.llava_onevision:build",
    "gemma3": "tests.checkpoints.gemma3:build",
    "qwen2_audio": "tests.checkpoints.qwen2_audio:build",
    "qwen2_5_omni": "tests.checkpoints.qwen2_5_omni:build",
}

NAMES = tuple(_BUILDERS)


def build(name: str, folder: Path) -> Path:
    """Write the checkpoint ``name`` into ``folder`` and return ``folder``.

    Args:
        name: One of `NAMES`.
        folder: Made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    module, _, function = _BUILDERS[name].partition(":")
    builder: Callable[[Path], None] = getattr(import_module(module), function)
    builder(folder)
    return folder
