"""The fixed seeds that every fault is repeated with."""

from __future__ import annotations

import pytest

SEEDS = (1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full))
"""The first alone runs with plain pytest; all of them with ``--full`` (``make faults``)."""
