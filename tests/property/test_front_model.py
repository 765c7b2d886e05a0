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

SEEDS = range(100, 250)
DEADLINE_S = 60
"""For one seed, which takes a hundredth of a second."""
MUST_HAPPEN = {
    "KV read",
    "answer failed",
    "answered",
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
SELDOM = {"KV lost", "asked for", "held and lost"}
"""Events of a few seeds in a hundred."""


def test_everybody_is_answered_whatever_happens(tmp_path: Path) -> None:
    config, happened = config_of_front(), Counter[str]()
    seeds, must_happen = SEEDS, MUST_HAPPEN
    if is_thorough():
        first = random.SystemRandom().randrange(10**6, 10**9)
        seeds, must_happen = range(first, first + len(SEEDS) * TIMES), MUST_HAPPEN | SELDOM
    for seed in seeds:
        world = World(seed, config, tmp_path)
        try:
            asyncio.run(asyncio.wait_for(world.run(), DEADLINE_S))
        except BaseException as error:
            raise AssertionError("\n".join([f"seed {seed}", *world.trace])) from error
        happened += world.happened
    assert {what for what, count in happened.items() if count} >= must_happen
