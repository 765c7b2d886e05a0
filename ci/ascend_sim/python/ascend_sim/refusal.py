"""Errors of the simulation: a call is not modelled, or is wrong."""

from __future__ import annotations

from typing import NoReturn


def refuse(operator: str, what: str) -> NoReturn:
    """Raise because the call may be right, but is not modelled.

    Args:
        operator: The operator's name.
        what: The argument and its value, or the feature.

    Raises:
        NotImplementedError: Always; it names both.
    """
    raise NotImplementedError(
        f"ascend_sim does not model {operator} with {what}; model it, or call it another way"
    )


def require(condition: bool, operator: str, problem: str) -> None:
    """Check what the operator demands of its arguments.

    Raises:
        RuntimeError: ``condition`` is false: the caller is wrong, on a device as well.
    """
    if not condition:
        raise RuntimeError(f"ascend_sim: {operator}: {problem}")
