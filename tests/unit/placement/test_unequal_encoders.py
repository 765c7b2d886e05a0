"""Choice among encoders of unequal speed, such as CPU cores next to a GPU, in simulated time."""

from __future__ import annotations

import heapq
import random
from contextlib import ExitStack
from statistics import fmean

import pytest

from epd_portable.placement.instances import EndpointPool, Instance
from tests.unit.builders import instance_settings
from tests.unit.placement.profiles.situations import Picture

GPU_S, CPU_S = 0.027, 0.43
"""Seconds for an image of 1008² on a GPU and on the cores of its server."""
IMAGE = Picture(item_uuid="any", pixels=1008 * 1008)


def pool_of(**seconds: float) -> EndpointPool:
    """Return encoders that are up, and known to take so many seconds for an image."""
    pool = EndpointPool(chance=random.Random(7))
    for name, encode_s in seconds.items():
        pool.add(instance_settings(name)).health.seen_up()
        for _ in range(3):
            pool.encode_times.observe(IMAGE, encode_s, name)
    return pool


def choose(pool: EndpointPool, name: str) -> Instance:
    chosen = pool.choose_encoder(name, item=IMAGE)
    assert chosen is not None
    return chosen


def simulate(seconds: dict[str, float], *, load: float, count: int = 4000) -> list[float]:
    """Return the seconds from arrival to encoded of random arrivals at a part of the GPU's rate."""
    pool, chance = pool_of(**seconds), random.Random(1)
    free_at = dict.fromkeys(seconds, 0.0)
    running: list[tuple[float, int, str, ExitStack]] = []
    now, found = 0.0, []
    for number in range(count):
        now += chance.expovariate(load / GPU_S)
        while running and running[0][0] <= now:
            _, _, name, stack = heapq.heappop(running)
            stack.close()
            pool.encode_times.observe(IMAGE, seconds[name], name)
        encoder = choose(pool, f"p{number}")
        name = encoder.name
        free_at[name] = end = max(now, free_at[name]) + seconds[name]
        stack = ExitStack()
        stack.enter_context(encoder.in_flight(f"p{number}"))
        stack.enter_context(encoder.encoding(pool.encode_times.of(IMAGE, name)))
        heapq.heappush(running, (end, number, name, stack))
        found.append(end - now)
    while running:
        running.pop()[-1].close()
    return found


@pytest.mark.parametrize("load", [0.3, 0.6, 0.9, 1.02])
def test_slow_encoder_delays_few_images_and_helps_under_overload(load: float) -> None:
    alone = simulate({"gpu": GPU_S}, load=load)
    helped = simulate({"gpu": GPU_S, "cpu": CPU_S}, load=load)
    assert fmean(helped) <= fmean(alone) * 1.04, "late images only to measure the CPU again"
    if load > 1:
        assert fmean(helped) < 0.5 * fmean(alone)


def test_encoder_after_a_slow_moment_gets_half_of_the_images() -> None:
    pool = pool_of(one=GPU_S, other=GPU_S)
    for _ in range(5):
        pool.encode_times.observe(IMAGE, 2 * GPU_S, "other")
    chosen = [choose(pool, f"p{number}").name for number in range(300)]
    assert set(chosen) == {"one"}
    for number in range(600):
        name = choose(pool, f"p{number}").name
        pool.encode_times.observe(IMAGE, GPU_S, name)
        chosen.append(name)
    assert 0.4 < chosen[-200:].count("other") / 200 < 0.6


def test_no_encoder_is_slow_for_a_first_job_or_a_busy_moment() -> None:
    pool = pool_of(other=GPU_S)
    times, seen = pool.encode_times, []
    for seconds in (9.0, GPU_S, GPU_S, 9.0, GPU_S, 9.0, 9.0):
        times.observe(IMAGE, seconds, "one")
        seen.append(times.of(IMAGE, "one"))
    assert seen[2:] == [GPU_S, GPU_S, GPU_S, GPU_S, 9.0]


def test_working_encoder_is_not_slow_for_a_job_of_another() -> None:
    times = pool_of(one=GPU_S, other=GPU_S).encode_times
    times.observe(IMAGE, 9.0, "other")
    assert times.of(IMAGE) > 10 * GPU_S
    assert (times.of(IMAGE, "one"), times.of(IMAGE, "other")) == (GPU_S, GPU_S)


def test_encoder_that_has_left_is_forgotten() -> None:
    pool = pool_of(gpu=GPU_S, cpu=CPU_S)
    pool.remove("cpu")
    times = pool.encode_times
    assert times.of(IMAGE, "cpu") == times.of(IMAGE) != CPU_S
    times.observe(IMAGE, GPU_S, "cpu")
    assert times.of(IMAGE, "cpu") == times.of(IMAGE), "jobs of its former time do not count"
