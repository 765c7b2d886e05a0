"""Imported before vLLM: its Triton kernels run on the CPU, in Triton's interpreter.

vLLM wants Triton's compiler for the CPU, which no public index has. With ``TRITON_INTERPRET=1`` its
second model runner computes without, slowly. Processes that are forked from this one do too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

HAS_TRITON = {
    "vllm.triton_utils.importing": True,
    # Its kernel asks a loop's index for a conversion, which is a plain number when interpreted.
    "vllm.v1.sample.ops.topk_topp_sampler": False,
}
"""Values of `HAS_TRITON` in modules of vLLM, in any order of imports."""


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in HAS_TRITON else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.HAS_TRITON = HAS_TRITON[name]

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
