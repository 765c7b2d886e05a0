from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from epd_portable.bench.sizing.timeline import FifoServer, Process, Timeline


def done_at_s(arrivals_s: list[float], works_s: list[float]) -> tuple[FifoServer, list[float]]:
    """Let a server do pieces of work; return it and when each is done."""
    timeline = Timeline()
    server = FifoServer(timeline)
    done: list[float] = []

    def piece(arrival_s: float, work_s: float) -> Process:
        yield arrival_s
        yield server.accept(work_s)
        done.append(timeline.now)

    for each in zip(arrivals_s, works_s, strict=True):
        timeline.start(piece(*each))
    timeline.run()
    return server, done


def test_what_is_due_is_called_in_order_and_ties_in_the_order_of_setting() -> None:
    timeline = Timeline()
    seen: list[tuple[float, str]] = []
    for when_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        timeline.at(when_s, lambda name: seen.append((timeline.now, name)), name)
    timeline.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_pieces_of_work_wait_for_those_before_them() -> None:
    server, done = done_at_s([0.0, 1.0, 10.0], [3.0, 3.0, 1.0])
    assert done == [3.0, 6.0, 11.0]
    assert server.busy_s == 7.0


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_exponential_work_waits_as_long_as_theory_says(load: float) -> None:
    """M/M/1: the mean wait is load × work / (1 - load)."""
    draw, count = np.random.default_rng(4), 50_000
    arrivals_s = np.cumsum(draw.exponential(1 / load, count)).tolist()
    works_s = draw.exponential(1.0, count).tolist()
    _, done = done_at_s(arrivals_s, works_s)
    waits = (end - begin - work for begin, work, end in zip(arrivals_s, works_s, done, strict=True))
    assert fmean(waits) == pytest.approx(load / (1 - load), rel=0.1)
