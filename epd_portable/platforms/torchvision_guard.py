"""Lets a torchvision whose compiled part does not load be used for its transforms.

A package index often pairs the CPU build of torch with the CUDA build of torchvision. Its operators
then cannot be loaded, and ``import torchvision`` fails where it describes one of them
(``operator torchvision::nms does not exist``), although vLLM's models need only its transforms,
which are plain Python. Declaring that operator and its quantised sister is enough.

The guard does nothing until torchvision itself has tried its compiled part and failed, so a working
torchvision is left untouched, and a process that never imports torchvision pays nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)
# torchvision imports this submodule right after it has tried its compiled part.
_TRIGGER = "torchvision._meta_registrations"
_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_declared: torch.library.Library | None = None
"""Keeps the declarations: torch drops them with their library."""


class TorchvisionGuard(MetaPathFinder):
    """Watches for torchvision's import; finds no module itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Act at the one moment that matters, and leave the finding to others."""
        if fullname == _TRIGGER:
            _declare_missing_operators()
        return None


def install() -> None:
    """Watch for torchvision's first import in this process; calling again does nothing.

    Imports neither torch nor torchvision. The decision is logged at debug level when it is made.
    """
    if _TRIGGER in sys.modules:
        _LOG.debug("torchvision is imported already: nothing to do")
        return
    if any(isinstance(finder, TorchvisionGuard) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, TorchvisionGuard())


def _declare_missing_operators() -> None:
    global _declared
    if sys.modules["torchvision.extension"]._has_ops():
        _LOG.debug("torchvision's operators are loaded: left untouched")
        return

    import torch

    missing = [name for name in _OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if not missing:
        _LOG.debug("torchvision's operators are declared by somebody else: left untouched")
        return
    _declared = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in missing:
        _declared.define(name + _SCHEMA)  # type: ignore[no-untyped-call]
    _LOG.debug(
        "torchvision's operators do not load beside torch %s: declared %s, so that its transforms "
        "can be used",
        torch.__version__,
        ", ".join(missing),
    )
