"""Stands for ``fla_npu.ops.ascendc``: every kernel can be imported, none can be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"ascend_sim does not model fla_npu's {name} (linear attention)")

    return refuse
