"""Lets media libraries whose compiled part does not load be used for their Python part.

A package index often pairs the CPU build of torch with the CUDA builds of torchvision, torchaudio
and torchcodec. Their compiled parts then cannot be loaded, and importing them fails in ways that
vLLM and transformers do not expect, although an image needs only what is written in Python:

* torchvision ends where it describes one of its operators (``operator torchvision::nms does not
  exist``). Declaring that operator and its quantised sister is enough for its transforms.
* torchaudio, which transformers imports for every multimodal processor, raises ``OSError``. It does
  without its library if the loading function reports that there is none.
* torchcodec cannot do without, and vLLM expects ``ImportError`` then; it raises ``OSError``.

The guard must be installed in every process of the engine before its first import of transformers.
vLLM loads ``vllm.general_plugins`` later than that, ``vllm.platform_plugins`` in time. `install` is
therefore a platform plug-in, one that returns ``None``: no platform here.

Nothing is done before a library has tried its compiled part and failed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)
_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_declared: torch.library.Library | None = None
"""Keeps the declarations: torch drops them with their library."""


class MediaGuard(MetaPathFinder):
    """Mends the modules that try a library's compiled part, as soon as each has been run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module as the usual finder would, or ``None`` to let the usual one go on."""
        if fullname not in _MENDS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_mend(module: ModuleType) -> None:
                run(module)
                _MENDS[fullname](module)

            spec.loader.exec_module = run_and_mend  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Watch for the libraries' first import in this process; imports none of them, nor torch."""
    if any(isinstance(finder, MediaGuard) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, MediaGuard())


def _declare_missing_operators(extension: Any) -> None:
    """Declare what ``torchvision`` describes next."""
    global _declared
    if extension._has_ops():
        _LOG.debug("torchvision's operators are loaded: left untouched")
        return

    import torch

    missing = [name for name in _OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if not missing:
        _LOG.debug("torchvision's operators are declared elsewhere: left untouched")
        return
    _declared = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in missing:
        _declared.define(name + _SCHEMA)  # type: ignore[no-untyped-call]
    _LOG.debug(
        "torchvision's operators do not load with torch %s: declared %s, so that its transforms "
        "can be used",
        torch.__version__,
        ", ".join(missing),
    )


def _answer_no(utils: Any) -> None:
    if (load := getattr(utils, "_load_lib", None)) is None:
        return

    def load_or_say_no(library: str) -> Any:
        try:
            return load(library)
        except OSError as error:
            _LOG.debug("torchaudio is used without its compiled part: %s", error)
            return False

    utils._load_lib = load_or_say_no


def _raise_import_error(utils: Any) -> None:
    if (load := getattr(utils, "load_image_library", None)) is None:
        return

    def load_or_be_absent() -> Any:
        try:
            return load()
        except OSError as error:
            _LOG.debug("torchcodec cannot be used: %s", error)
            raise ImportError(f"torchcodec's compiled part does not load: {error}") from error

    utils.load_image_library = load_or_be_absent


_MENDS: dict[str, Callable[[Any], None]] = {
    "torchvision.extension": _declare_missing_operators,
    "torchaudio._extension.utils": _answer_no,
    "torchcodec._internally_replaced_utils": _raise_import_error,
}
