"""Whatever happens to engines and clients, everybody is answered, or told why not, and rightly."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.integration.front.played_front import config_of_front
from tests.property.budget import TIMES, is_thorough
from tests.property.front_world import World

pytestmark = pytest.mark.needs_vllm

SEEDS = 300
DEADLINE_S = 60
"""For one seed, which takes a hundredth of a second."""
MUST_HAPPEN = {
    "KV lost",
    "KV read",
    "answer failed",
    "answered",
    "asked for",
    "asked for again",
    "brought",
    "came back",
    "die",
    "drain",
    "encode failed",
    "encoded where it was needed",
    "failed",
    "failed after a token",
    "forget",
    "given up",
    "held",
    "held and lost",
    "job refused",
    "loaded",
    "not loaded",
    "part encoded",
    "part encoded where it was needed",
    "prefill failed",
    "refused",
    "say and die",
    "stop",
    "without an item",
}


def test_everybody_is_answered_whatever_happens(tmp_path: Path) -> None:
    config, happened = config_of_front(), Counter[str]()
    first = random.SystemRandom().randrange(10**6, 10**9) if is_thorough() else 0
    for seed in range(first, first + SEEDS * (TIMES if is_thorough() else 1)):
        world = World(seed, config, tmp_path)
        try:
            asyncio.run(asyncio.wait_for(world.run(), DEADLINE_S))
        except BaseException as error:
            raise AssertionError("\n".join([f"seed {seed}", *world.trace])) from error
        happened += world.happened
    assert {what for what, count in happened.items() if count} >= MUST_HAPPEN
