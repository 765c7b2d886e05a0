"""Checks of arguments that every implementation makes alike."""

from __future__ import annotations

import math


def check_address(address: int) -> None:
    """Refuse a null address.

    Raises:
        ValueError: Not positive.
    """
    if address <= 0:
        raise ValueError(f"address {address:#x} is no host memory; pass the start of a mapping")


def check_nbytes(nbytes: int) -> None:
    """Refuse an empty range.

    Raises:
        ValueError: Not positive.
    """
    if nbytes <= 0:
        raise ValueError(f"a range of {nbytes} bytes; it must hold at least one")


def check_timeout(timeout_s: float) -> None:
    """Refuse a deadline that is over already, or never.

    Raises:
        ValueError: Not a positive finite number.
    """
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ValueError(f"timeout_s={timeout_s!r}; it must be positive and finite")
