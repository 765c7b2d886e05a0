from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd_portable.bench.sizing.engine import SimulatedEngine
from epd_portable.bench.sizing.stages import StageTimes
from epd_portable.bench.sizing.timeline import Timeline
from epd_portable.bench.sizing.workload import PictureItem, SimulatedRequest
from tests.unit.bench.sizing.samples import stage_times


class Run:
    """An engine without anything before it; times are those at which it computes tokens."""

    def __init__(self, times: StageTimes) -> None:
        self.timeline = Timeline()
        self.engine = SimulatedEngine(self.timeline, times, on_first=self.first, on_last=self.last)

    def first(self, request: SimulatedRequest) -> None:
        request.first_token_s = self.timeline.now

    def last(self, request: SimulatedRequest) -> None:
        assert request.end_s < 0
        request.end_s = self.timeline.now

    def text(self, arrival_s: float, tokens: int, output: int = 1) -> SimulatedRequest:
        return self.request(arrival_s, tokens, output, [])

    def request(
        self, arrival_s: float, tokens: int, output: int, items: list[PictureItem]
    ) -> SimulatedRequest:
        request = SimulatedRequest(
            arrival_s=arrival_s, text_tokens=tokens, output_tokens=output, items=items
        )
        self.timeline.at(arrival_s, self.engine.submit, request)
        return request


def picture(**changes: Any) -> PictureItem:
    return PictureItem(pixels=448 * 448, embeddings=256, **changes)


def test_a_prompt_longer_than_a_step_is_computed_in_chunks() -> None:
    run = Run(stage_times(engine={"max_num_batched_tokens": 1000}))
    request = run.text(0.0, 2500)
    run.timeline.run()
    assert run.engine.steps == 3
    assert request.ttft_s == pytest.approx(3 * 0.1 + 2.5)


def test_no_more_requests_compute_than_there_are_places() -> None:
    run = Run(stage_times(engine={"max_num_seqs": 1}))
    first, second = run.text(0.0, 100, output=11), run.text(0.0, 100)
    run.timeline.run()
    assert first.end_s == pytest.approx(0.2 + 10 * 0.02)
    assert second.first_token_s == pytest.approx(first.end_s + 0.2)


def test_an_encode_in_a_step_stalls_everybodys_tokens() -> None:
    run = Run(stage_times())
    text = run.text(0.0, 100, output=51)
    run.request(0.5, 44, 1, [picture()])
    run.timeline.run()
    # One of the 50 steps takes encode, prefill of 300 tokens and the sequence in place of 0.02.
    longest_s = 0.5 + 0.1 + 0.3 + 0.01
    assert text.tpot_s == pytest.approx((49 * 0.02 + longest_s) / 50)
    assert run.engine.encode_s == pytest.approx(0.5)


def test_a_picture_that_is_encoded_elsewhere_stalls_nobody_and_is_waited_for() -> None:
    run = Run(stage_times())
    text = run.text(0.0, 100, output=51)
    item = picture(here=False)
    request = run.request(0.5, 44, 1, [item])

    def land(_: None) -> None:
        item.encoded = True
        run.engine.landed(request)

    run.timeline.at(1.0, land, None)
    run.timeline.run()
    assert request.first_token_s == pytest.approx(1.0 + 0.41, abs=0.02)
    assert text.tpot_s == pytest.approx((49 * 0.02 + 0.41) / 50)
    assert run.engine.encode_s == 0


def test_what_has_landed_is_computed_before_the_rest_is_there() -> None:
    run = Run(stage_times())
    items = [picture(here=False), picture(here=False)]
    request = run.request(0.0, 10, 1, items)
    for when_s, item in ((1.0, items[0]), (9.0, items[1])):

        def land(item: PictureItem) -> None:
            item.encoded = True
            run.engine.landed(request)

        run.timeline.at(when_s, land, item)
    run.timeline.run()
    assert request.first_token_s == pytest.approx(9.0 + 0.1 + 0.266)
    assert run.engine.steps == 2


def test_pictures_beyond_the_limit_of_a_step_are_encoded_in_the_next() -> None:
    run = Run(stage_times(engine={"max_encoder_tokens": 300}))
    request = run.request(0.0, 10, 1, [picture(), picture()])
    run.timeline.run()
    assert run.engine.steps == 2
    assert request.ttft_s == pytest.approx(2 * (0.1 + 0.5) + 0.522)


def test_a_text_does_not_wait_while_pictures_are_prepared_and_pictures_do() -> None:
    run = Run(stage_times(front_end={"request_s": 0.1, "picture_s": 5.0}))
    first = run.request(0.0, 44, 1, [picture()])
    second = run.request(0.0, 44, 1, [picture()])
    text = run.text(0.0, 100)
    run.timeline.run()
    assert text.ttft_s == pytest.approx(3 * 0.1 + 0.2)
    assert first.ttft_s == pytest.approx(0.1 + 5.0 + 0.9)
    assert second.ttft_s == pytest.approx(0.1 + 10.0 + 0.9)


def step_by_step(
    times: StageTimes, arrivals: list[tuple[float, int, int]]
) -> list[tuple[float, float]]:
    """Return first and last token of texts, by the plainest of loops."""
    now, waiting, left = 0.0, list(range(len(arrivals))), {}
    first, last = [0.0] * len(arrivals), [0.0] * len(arrivals)
    while waiting or left:
        now = max(now, arrivals[waiting[0]][0]) if not left else now
        begun = [index for index in waiting if arrivals[index][0] <= now]
        tokens = sum(arrivals[index][1] for index in begun)
        base_s = max(times.prefill.base_s * bool(begun), times.decode.base_s * bool(left))
        now += base_s + times.prefill.per_token_s * tokens
        now += times.decode.per_sequence_s * len(left)
        for index in list(left):
            left[index] -= 1
            if not left[index]:
                last[index] = now
                del left[index]
        for index in begun:
            waiting.remove(index)
            first[index] = last[index] = now
            if arrivals[index][2] > 1:
                left[index] = arrivals[index][2] - 1
    return list(zip(first, last, strict=True))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 30))
def test_counting_steps_together_gives_the_times_of_a_step_at_a_time(seed: int, count: int) -> None:
    draw = random.Random(seed)
    times = stage_times(engine={"max_num_batched_tokens": 1_000_000})
    arrivals = [
        (arrival_s, draw.randint(1, 300), draw.randint(1, 80))
        for arrival_s in sorted(draw.uniform(0, 20) for _ in range(count))
    ]
    run = Run(times)
    requests = [run.text(*arrival) for arrival in arrivals]
    run.timeline.run()
    seen = [(request.first_token_s, request.end_s) for request in requests]
    assert seen == [pytest.approx(each) for each in step_by_step(times, arrivals)]
