"""Operators of one namespace as torch registers them, kept for as long as the process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch

_libraries: list[torch.library.Library] = []
"""Torch drops what is registered together with its library."""


class Namespace:
    """Defines and implements operators of ``torch.ops.<name>``."""

    def __init__(self, name: str, kind: Literal["DEF", "FRAGMENT", "IMPL"]) -> None:
        """Open the namespace.

        Args:
            name: Its name.
            kind: ``DEF`` makes it, ``FRAGMENT`` adds operators, ``IMPL`` only implements.
        """
        self._library = torch.library.Library(name, kind)  # type: ignore[no-untyped-call]
        _libraries.append(self._library)

    def define(self, schema: str) -> None:
        """Add an operator by its schema."""
        self._library.define(schema)  # type: ignore[no-untyped-call]

    def implement(
        self, name: str, kernel: Callable[..., Any], dispatch_key: str = "PrivateUse1"
    ) -> None:
        """Let ``kernel`` compute an operator, for the npu device unless another key is given."""
        with warnings.catch_warnings():
            # Torch warns of a kernel that replaces another: that is what happens to aten's.
            warnings.simplefilter("ignore", UserWarning)
            self._library.impl(name, kernel, dispatch_key)  # type: ignore[no-untyped-call]
