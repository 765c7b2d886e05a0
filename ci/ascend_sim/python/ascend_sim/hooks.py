"""Completes torch_npu and vllm-ascend as they are imported; none of their files is changed.

A ``.pth`` file of the environment imports this module when Python starts, so it must cost nothing
in a process that never imports either package: it imports the standard library only.

``ASCEND_SIM_DOUBLE=0`` leaves everything as it is, for tests of the runtime alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from types import ModuleType
else:
    Loader = object

AFTER = {
    "torch_npu": "ascend_sim.aten:register",
    "torch_npu.op_plugin.atb._atb_ops": "ascend_sim.vendor.atb:replace",
}
"""Modules, and the function that is called with each right after it was executed."""

KERNELS = {
    "vllm_ascend.ops.register_custom_ops": "ascend_sim.vendor.qkv:register",
    "vllm_ascend.ops.triton.compute_slot_mapping": "ascend_sim.vendor.slot_mapping:replace",
    # Whence vllm-ascend 0.23 takes it.
    "vllm.v1.worker.block_table": "ascend_sim.vendor.slot_mapping:replace",
}
INTERPRETED = {"vllm.triton_utils.importing": "ascend_sim.interpreter:install"}
"""Triton kernels: doubles of two, without Triton, or the interpreter, which runs all of them."""

AFTER |= INTERPRETED if os.environ.get("TRITON_INTERPRET") == "1" else KERNELS

INSTEAD = {"vllm_ascend.vllm_ascend_C": "ascend_sim.vendor.extension:register"}
"""Compiled modules that need CANN: an empty module, and the function that fills in for it."""


class AscendFinder:
    """Finds the modules of both tables; every other import is left to the usual finders."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec whose loader also calls the module's function, or ``None``."""
        if name in INSTEAD:
            return ModuleSpec(name, _CompletingLoader(None, INSTEAD[name]))
        if name not in AFTER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _CompletingLoader(spec.loader, AFTER[name])
        return spec


class _CompletingLoader(Loader):
    """Runs a module as its own loader does, if it has one, then calls a function with it."""

    def __init__(self, inner: Loader | None, function: str) -> None:
        self._inner = inner
        self._function = function

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None if self._inner is None else self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self._inner is not None:
            self._inner.exec_module(module)
        home, _, function = self._function.partition(":")
        getattr(importlib.import_module(home), function)(module)

    def __getattr__(self, name: str) -> object:
        # Loaders have optional methods (get_source, get_resource_reader, is_package).
        if self._inner is None:
            raise AttributeError(name)
        return getattr(self._inner, name)


def install() -> None:
    """Watch the imports of this process; calling again does nothing."""
    if os.environ.get("ASCEND_SIM_DOUBLE") != "0" and AscendFinder not in sys.meta_path:
        sys.meta_path.insert(0, AscendFinder)


install()
