from __future__ import annotations

import numpy as np
import pytest

from epd_portable.bench.sizing.timeline import FifoServer, Timeline

COUNT = 200_000


def waits(arrivals_s: list[float], works_s: list[float]) -> tuple[FifoServer, float]:
    """Let a server do pieces of work; return it and the time when all are done."""
    timeline = Timeline()
    server = FifoServer(timeline)
    done: list[float] = []

    def arrive(work_s: float) -> None:
        server.serve(work_s, lambda _: done.append(timeline.now), None)

    for arrival_s, work_s in zip(arrivals_s, works_s, strict=True):
        timeline.at(arrival_s, arrive, work_s)
    timeline.run()
    assert len(done) == len(arrivals_s)
    return server, timeline.now


def test_what_is_due_is_called_in_order_and_ties_in_the_order_of_setting() -> None:
    timeline = Timeline()
    seen: list[tuple[float, str]] = []
    for when_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        timeline.at(when_s, lambda name: seen.append((timeline.now, name)), name)
    timeline.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_pieces_of_work_wait_for_those_before_them() -> None:
    server, end_s = waits([0.0, 1.0, 10.0], [3.0, 3.0, 1.0])
    assert end_s == 11.0
    assert server.waited_s == 2.0
    assert server.busy_s == 7.0


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_constant_work_waits_as_long_as_theory_says(load: float) -> None:
    """M/D/1: the mean wait is load × work / (2 (1 - load))."""
    draw = np.random.default_rng(3)
    arrivals_s = np.cumsum(draw.exponential(1 / load, COUNT)).tolist()
    server, end_s = waits(arrivals_s, [1.0] * COUNT)
    assert server.waited_s / COUNT == pytest.approx(load / (2 * (1 - load)), rel=0.03)
    assert server.busy_s / end_s == pytest.approx(load, rel=0.01)


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_exponential_work_waits_as_long_as_theory_says(load: float) -> None:
    """M/M/1: the mean wait is load × work / (1 - load)."""
    draw = np.random.default_rng(4)
    arrivals_s = np.cumsum(draw.exponential(1 / load, COUNT)).tolist()
    server, end_s = waits(arrivals_s, draw.exponential(1.0, COUNT).tolist())
    assert server.waited_s / COUNT == pytest.approx(load / (1 - load), rel=0.05)
    assert server.busy_s / end_s == pytest.approx(load, rel=0.01)
