"""A PD instance of two ranks on the CPU, with fewer cores than ranks too."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Pair, Start
from tests.e2e.ranks import TWO_RANKS, TwoRanks

pytestmark = [pytest.mark.e2e, pytest.mark.needs_vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def pair(start: Start) -> Pair:
    # Ranks that share cores with other work answer slowly at times.
    patience = ["transfer.wait_timeout_s=120", "transfer.lease_s=60"]
    return start(["engine_args.dtype=float32", TWO_RANKS, *patience])


class TestTwoRanks(TwoRanks):
    """The ranks exchange their sums through shared memory, and wait for each other by spinning."""
