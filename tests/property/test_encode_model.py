"""Whatever happens to an encode instance, its requests end; over vLLM's real scheduler.

See `tests.property.engine_model.encode`, which tries any number of seeds on demand.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.property.budget import TIMES, is_thorough

pytestmark = pytest.mark.needs_vllm

SEEDS = 60
MUST_HAPPEN = {
    "copies lost",
    "items encoded",
    "items missing",
    "items restored",
    "items without memory",
    "items without memory twice",
    "requests that ended: cancelled",
    "requests that ended: stop",
    "requests with several items",
    "resets",
    "transfers",
    "transfers preempted",
}


def test_requests_end_despite_consumers_that_accept_nothing() -> None:
    from tests.property.engine_model.encode import World
    from tests.property.engine_model.running import Failure, attempt

    seen: Counter[str] = Counter()
    for seed in range(SEEDS * (TIMES if is_thorough() else 1)):
        found = attempt(seed, World, lines=60)
        assert not isinstance(found, Failure), found
        seen += found
    assert seen.keys() >= MUST_HAPPEN, MUST_HAPPEN - seen.keys()
