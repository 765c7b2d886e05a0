from __future__ import annotations

import pytest

from epd_portable.bench.mix import Mix, checked_mix, read_keys
from epd_portable.bench.sizing.workload import draw_requests
from tests.unit.bench.sizing.samples import stage_times


def read(text: str) -> Mix:
    return checked_mix("--workload", text, Mix, read_keys("--workload", text, Mix))


def test_a_mix_is_read_as_it_is_shown() -> None:
    mix = read("share=0.3,pictures=1/4,size=448/1024,output=60")
    assert mix == Mix(share=0.3, pictures=(1, 4), size=(448, 1024), output=60)
    assert read(str(mix)) == mix


def test_requests_have_the_rate_and_the_mix_that_was_asked_for() -> None:
    mix = Mix(share=0.25, pictures=(1, 4), size=(448,), text=10, output=5)
    found = draw_requests(mix, stage_times(), rate=4.0, count=20_000, seed=1)
    assert found[-1].arrival_s == pytest.approx(5000, rel=0.03)
    with_pictures = [request for request in found if request.items]
    assert len(with_pictures) / 20_000 == pytest.approx(0.25, rel=0.05)
    assert {len(request.items) for request in with_pictures} == {1, 4}
    assert {(request.text_tokens, request.output_tokens) for request in found} == {(10, 5)}
    assert {item.embeddings for request in with_pictures for item in request.items} == {256}


def test_another_rate_brings_the_same_requests_closer_together() -> None:
    mix = Mix(share=0.5, pictures=(1, 2, 3))
    slow, fast = (draw_requests(mix, stage_times(), rate=r, count=100, seed=7) for r in (1.0, 10.0))
    assert [each.arrival_s for each in slow] == pytest.approx(
        [10 * each.arrival_s for each in fast]
    )
    assert [len(each.items) for each in slow] == [len(each.items) for each in fast]
