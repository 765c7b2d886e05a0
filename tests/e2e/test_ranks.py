"""A PD instance of two ranks on the CPU, with fewer cores than ranks too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import Pair
from tests.e2e.ranks import TWO_RANKS, TwoRanks

pytestmark = [pytest.mark.e2e, pytest.mark.needs_vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def pair(start: Callable[..., Any]) -> Pair:
    # Ranks that share cores with other work answer slowly at times.
    patience = ["transfer.wait_timeout_s=120", "transfer.lease_s=60"]
    started: Pair = start(
        ["engine_args.dtype=float32", TWO_RANKS, *patience], reference_args={"dtype": "float32"}
    )
    return started


class TestTwoRanks(TwoRanks):
    """The ranks exchange their sums through shared memory, and wait for each other by spinning."""
