"""In float32 the split gives the tokens of one process, and its log-probabilities within 1e-3."""

from __future__ import annotations

from tests.e2e.equality import FloatEquality


class TestOnCpu(FloatEquality):
    """By shared memory, the path that two instances on CPU take by themselves."""
