"""Lets media libraries whose compiled part does not load be used for their Python part.

A package index often pairs the CPU build of torch with the CUDA builds of torchvision, torchaudio
and torchcodec. Their compiled parts then cannot be loaded, and importing them fails in ways that
vLLM and transformers do not expect, although a picture needs only what is written in Python:

* torchvision ends where it describes one of its operators (``operator torchvision::nms does not
  exist``). Declaring that operator and its quantised sister is enough for its transforms.
* torchaudio, which transformers imports for every multimodal processor, raises ``OSError``. It does
  without its library if the loading function answers that there is none.
* torchcodec cannot do without, and vLLM expects ``ImportError`` then; it raises ``OSError``.

The guard must be installed in every process of the engine before its first import of transformers.
vLLM loads ``vllm.general_plugins`` later than that, ``vllm.platform_plugins`` in time. `install` is
therefore a platform plug-in, one that answers ``None``: no platform here.

Nothing is done before a library has tried its compiled part and failed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)
# torchvision imports this submodule right after it has tried its compiled part.
_VISION_TRIGGER = "torchvision._meta_registrations"
_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_Function = Callable[..., Any]

_declared: torch.library.Library | None = None
"""Keeps the declarations: torch drops them with their library."""


class MediaGuard(MetaPathFinder):
    """Watches for the moments that matter in the imports of the three libraries."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module as the usual finder would, or ``None`` to let the usual one go on."""
        if fullname == _VISION_TRIGGER:
            _declare_missing_operators()
        elif fullname in _LOADING_FUNCTIONS:
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _WrappingLoader(spec.loader, *_LOADING_FUNCTIONS[fullname])
            return spec
        return None


def install() -> None:
    """Watch for the libraries' first import in this process; imports none of them, nor torch."""
    if any(isinstance(finder, MediaGuard) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, MediaGuard())


def _declare_missing_operators() -> None:
    global _declared
    if sys.modules["torchvision.extension"]._has_ops():
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


def _answer_no(load: _Function) -> _Function:
    def load_or_say_no(library: str) -> Any:
        try:
            return load(library)
        except OSError as error:
            _LOG.debug("torchaudio is used without its compiled part: %s", error)
            return False

    return load_or_say_no


def _raise_import_error(load: _Function) -> _Function:
    def load_or_be_absent() -> Any:
        try:
            return load()
        except OSError as error:
            _LOG.debug("torchcodec cannot be used: %s", error)
            raise ImportError(f"torchcodec's compiled part does not load: {error}") from error

    return load_or_be_absent


_LOADING_FUNCTIONS: dict[str, tuple[str, Callable[[_Function], _Function]]] = {
    "torchaudio._extension.utils": ("_load_lib", _answer_no),
    "torchcodec._internally_replaced_utils": ("load_image_library", _raise_import_error),
}
"""Modules with the function that loads a compiled part, if they have it, and what wraps that."""


class _WrappingLoader(Loader):
    """Runs a module as its own loader does, then wraps one of its functions."""

    def __init__(
        self, inner: Loader, function: str, wrap: Callable[[_Function], _Function]
    ) -> None:
        self._inner = inner
        self._function = function
        self._wrap = wrap

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        if hasattr(module, self._function):
            setattr(module, self._function, self._wrap(getattr(module, self._function)))
