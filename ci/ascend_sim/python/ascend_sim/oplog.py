"""Counts the operators of a process, into a file if ``ASCEND_SIM_OPLOG`` names one.

The file is ``<ASCEND_SIM_OPLOG>.<pid>``: a line of count and name for each operator, most
frequent first. It is written on the way, because an engine process ends without exit handlers: at
every operator's first call, and at every thousandth call.
"""

from __future__ import annotations

import collections
import os
from pathlib import Path

CALLS: collections.Counter[str] = collections.Counter()
_PREFIX = os.environ.get("ASCEND_SIM_OPLOG")
_WRITE_EVERY_CALLS = 1000


def count(operator: str) -> None:
    """Count one call."""
    CALLS[operator] += 1
    if _PREFIX and (CALLS[operator] == 1 or CALLS.total() % _WRITE_EVERY_CALLS == 0):
        lines = [f"{calls} {name}\n" for name, calls in CALLS.most_common()]
        Path(f"{_PREFIX}.{os.getpid()}").write_text("".join(lines), encoding="utf-8")
