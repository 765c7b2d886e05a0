from __future__ import annotations

import itertools

import pytest

from epd_portable.bench.sizing.workload import Workload
from epd_portable.errors import ConfigError
from tests.unit.bench.sizing.samples import stage_times


def test_a_mix_is_read_as_it_is_shown() -> None:
    demand = Workload.read("share=0.3,pictures=1+4,size=448+1024,output=60,burst=2.5")
    assert demand == Workload(share=0.3, pictures=(1, 4), size=(448, 1024), output=(60,), burst=2.5)
    assert Workload.read(str(demand)) == demand
    assert Workload.read("") == Workload()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("share=2", "share: Input should be less than or equal to 1"),
        ("shape=2", "'shape=2' is none of share, pictures"),
        ("share", "'share' is none of"),
        ("pictures=0", "pictures.0: Input should be greater than or equal to 1"),
        ("size=large", "size.0: Input should be a valid integer"),
        ("burst=0", "burst: Input should be greater than 0"),
    ],
)
def test_what_is_wrong_with_a_mix_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Workload.read(text)
    assert words in str(caught.value)


def test_requests_have_the_rate_and_the_mix_that_was_asked_for() -> None:
    demand = Workload(share=0.25, pictures=(1, 4), size=(448,), text=(10,), output=(5, 7))
    found = demand.requests(stage_times(), rate=4.0, count=20_000, seed=1)
    assert found[-1].arrival_s == pytest.approx(5000, rel=0.03)
    with_pictures = [request for request in found if request.items]
    assert len(with_pictures) / 20_000 == pytest.approx(0.25, rel=0.05)
    assert {len(request.items) for request in with_pictures} == {1, 4}
    assert {request.output_tokens for request in found} == {5, 7}
    assert {item.embeddings for request in with_pictures for item in request.items} == {256}


def test_another_rate_brings_the_same_requests_closer_together() -> None:
    demand = Workload(share=0.5, pictures=(1, 2, 3))
    slow, fast = (
        demand.requests(stage_times(), rate=rate, count=100, seed=7) for rate in (1.0, 10.0)
    )
    assert [each.arrival_s for each in slow] == pytest.approx(
        [10 * each.arrival_s for each in fast]
    )
    assert [len(each.items) for each in slow] == [len(each.items) for each in fast]


@pytest.mark.parametrize("burst", [0.1, 1.0, 4.0])
def test_gaps_vary_as_much_as_was_asked_for(burst: float) -> None:
    found = Workload(burst=burst).requests(stage_times(), rate=1.0, count=50_000, seed=1)
    times = [request.arrival_s for request in found]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance / mean**2 == pytest.approx(burst, rel=0.1)
