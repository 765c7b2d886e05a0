from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest

from epd_portable.bench.client import Timing, read_stream
from epd_portable.errors import MeasurementError


def lines(*events: dict[str, object] | str) -> Iterator[str]:
    for event in events:
        yield "data: " + (event if isinstance(event, str) else json.dumps(event))
        yield ""


def piece(content: str) -> dict[str, object]:
    return {"choices": [{"delta": {"content": content}}]}


USAGE: dict[str, object] = {"choices": [], "usage": {"completion_tokens": 3}}


def timed(*events: dict[str, object] | str) -> Timing:
    """Read a stream on a clock that moves on by one second with each line."""
    ticks = itertools.count(101)
    return read_stream(lines(*events), 100.0, lambda: float(next(ticks)))


def test_the_first_token_counts_from_the_moment_of_sending() -> None:
    timing = timed(piece(""), piece("a"), piece("b"), piece("c"), USAGE, "[DONE]")
    assert timing.ttft_s == 3.0
    assert timing.gaps_s == (2.0, 2.0)
    assert timing.tokens == 3
    assert timing.latency_s > timing.ttft_s + 4.0


def test_the_longest_gap_shows_a_stall_that_the_time_per_token_hides() -> None:
    timing = Timing(ttft_s=1.0, gaps_s=(0.1, 0.7, 0.1), latency_s=2.0, tokens=4)
    assert timing.longest_gap_s == 0.7
    assert timing.tpot_s == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([piece("a"), USAGE], r"without \[DONE\]"),
        ([{"error": {"message": "engine died"}}, "[DONE]"], "engine died"),
        ([USAGE, "[DONE]"], "0 pieces of text"),
        ([piece("a"), "[DONE]"], "0 tokens"),
    ],
)
def test_a_broken_answer_is_not_timed(events: list[dict[str, object] | str], words: str) -> None:
    with pytest.raises(MeasurementError, match=words):
        timed(*events)
