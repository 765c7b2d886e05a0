"""In float32 the split gives the tokens of one process, and its log-probabilities within 1e-3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import Pair
from tests.e2e.equality import FloatEquality

pytestmark = [pytest.mark.e2e, pytest.mark.needs_vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def pair(start: Callable[..., Any]) -> Pair:
    started: Pair = start(["engine_args.dtype=float32"], reference_args={"dtype": "float32"})
    return started


class TestOnCpu(FloatEquality):
    """By shared memory, the path that two instances on CPU take by themselves."""
