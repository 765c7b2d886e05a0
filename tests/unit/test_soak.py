"""Growth of processes over a long run, told from peaks, steps and noise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ci.soak import MEMORY, growth

COUNT = 480
"""Samples of forty minutes."""


def series(value: Callable[[int], float]) -> list[float]:
    """Return samples with noise of 8, which is that of memory in MiB under load."""
    chance = random.Random(1)
    return [value(number) + chance.uniform(-4, 4) for number in range(COUNT)]


STEADY = {
    "noise": lambda number: 300,
    "a step": lambda number: 300 + 40 * (number > COUNT / 2),
    "a peak": lambda number: 300 + 200 * (COUNT / 3 < number < COUNT / 2),
    "a cache that fills": lambda number: 300 + 40 * min(1.0, 4 * number / COUNT),
    "release of memory": lambda number: 300 - 40 * number / COUNT,
}


@pytest.mark.parametrize("value", STEADY.values(), ids=STEADY)
def test_steady_memory_is_no_growth(value: Callable[[int], float]) -> None:
    assert growth({("front", MEMORY): series(value)}) == []


def test_leak_of_16_mib_is_found_in_noise() -> None:
    leaking, steady = series(lambda number: 300 + 16 * number / COUNT), series(lambda number: 300)
    (line,) = growth({("front", MEMORY): leaking, ("encode-1", MEMORY): steady})
    assert line.startswith(f"front: {MEMORY} rises by ")


@pytest.mark.parametrize("quantity", ["threads", "sockets", "other files"])
def test_leak_of_one_every_minute_is_found(quantity: str) -> None:
    leaking = [float(20 + number // 12) for number in range(COUNT)]
    pool = [20 + random.Random(number).randrange(4) for number in range(COUNT)]
    (line,) = growth({("front", quantity): leaking, ("encode-1", quantity): pool})
    assert line.startswith(f"front: {quantity} rises by ")


def test_run_without_enough_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="3 samples: at least 4 are needed"):
        growth({("front", "threads"): [1.0, 1.0, 1.0]})
