from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from epd_portable.bench.mix import Mix
from epd_portable.bench.sizing.simulate import Deployment, Outcome, Simulation
from epd_portable.bench.sizing.stages import StageTimes
from epd_portable.bench.sizing.workload import PictureItem, SimulatedRequest, draw_requests
from tests.unit.bench.sizing.samples import LIGHT, stage_times

SPLIT = Deployment(encoders=1, engines=1)
REPLICA = Deployment(encoders=0, engines=1)


def simulate(
    deployment: Deployment,
    demand: Mix,
    *,
    rate: float,
    count: int = 2000,
    elastic: float | None = None,
    times: StageTimes | None = None,
    seed: int = 1,
) -> tuple[Outcome, list[SimulatedRequest]]:
    times = times or stage_times()
    requests = draw_requests(demand, times, rate=rate, count=count, seed=seed)
    simulation = Simulation(times, deployment, elastic_threshold=elastic, seed=seed)
    return simulation.run(requests), requests


def mean_ttft_s(deployment: Deployment, demand: Mix, **options: Any) -> float:
    _, requests = simulate(deployment, demand, **options)
    return fmean(request.ttft_s for request in requests)


def with_pictures(arrival_s: float, count: int, output: int = 1) -> SimulatedRequest:
    items = [PictureItem(pixels=448**2, embeddings=256) for _ in range(count)]
    return SimulatedRequest(arrival_s=arrival_s, text_tokens=44, output_tokens=output, items=items)


def test_the_same_seed_gives_the_same_outcome_and_another_one_another() -> None:
    demand, deployment = Mix(share=0.3), Deployment(encoders=2, engines=20)
    one, two, other = (
        simulate(deployment, demand, rate=10, count=500, seed=seed)[0].kinds for seed in (1, 1, 2)
    )
    assert one == two
    assert one != other
    assert sum(kind.count for kind in one.values()) == 450, "the first are warm-up"


def test_pictures_at_one_encoder_wait_as_long_as_theory_says() -> None:
    """M/D/1 at a load of 0.6 with encodes of 0.5 s: 0.375 s in the mean, so 1.05 are owed."""
    times = stage_times(
        prefill={"base_s": 0.0, "per_token_s": 1e-9}, decode={"base_s": 0.0, "per_sequence_s": 0.0}
    )
    demand = Mix(share=1.0, output=1)
    outcome, requests = simulate(SPLIT, demand, rate=1.2, count=20_000, times=times)
    assert fmean(each.ttft_s for each in requests) == pytest.approx(0.5 + 0.375, rel=0.03)
    assert outcome.busy["encode"] == pytest.approx(1.2 * 0.5, rel=0.02)
    assert outcome.owed_s["encode"] == pytest.approx(1.2 * 0.875 * 0.5, rel=0.03)


def test_an_answer_is_owed_for_as_long_as_it_takes_and_is_its_share_of_the_engine() -> None:
    texts = Mix(share=0.0, text=44, output=11)
    alone, requests = simulate(REPLICA, texts, rate=0.01)
    answer_s = requests[0].end_s - requests[0].arrival_s
    assert alone.owed_s == {"answer": pytest.approx(0.01 * answer_s**2, rel=0.05)}
    # Several at a time owe less each: a step takes 0.01 s, and 0.01 s for each sequence.
    full, requests = simulate(REPLICA, texts, rate=2)
    long_s = fmean(each.end_s - each.arrival_s for each in requests)
    assert full.owed_s["answer"] < 0.9 * 2 * long_s * answer_s
    # A split's does not compute for an answer that waits for its picture.
    waits, _ = simulate(SPLIT, Mix(share=1.0, text=64, output=11), rate=0.01)
    assert waits.owed_s["answer"] < 0.01 * 1.2 * 0.8


def test_two_pictures_are_encoded_at_once_when_the_engine_may_encode_one() -> None:
    def ttft_s(threshold: float | None) -> float:
        request = with_pictures(1.0, 2)
        Simulation(stage_times(), SPLIT, elastic_threshold=threshold, seed=1).run([request])
        return request.ttft_s

    assert ttft_s(None) == pytest.approx(1.0 + 0.1 + 0.3)
    assert ttft_s(1.0) == pytest.approx(0.5 + 0.1 + 0.256 + 0.4)
    # Half the time is what an idle engine's encoding must be worth.
    assert ttft_s(4.0) == ttft_s(None)


def test_an_engine_that_computes_for_others_encodes_only_what_would_take_so_much_longer() -> None:
    def local(threshold: float) -> int:
        early, late = with_pictures(0.0, 1, output=1000), with_pictures(2.0, 4)
        simulation = Simulation(stage_times(), SPLIT, elastic_threshold=threshold, seed=1)
        outcome = simulation.run([early, late])
        assert outcome.local_items + outcome.transferred == 5
        return outcome.local_items

    # Four encodes of 0.5 s in a row against one, then three against two.
    assert [local(threshold) for threshold in (1.0, 2.0, 5.0)] == [2, 1, 0]


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9])
def test_where_nobody_generates_encoding_where_it_is_sooner_makes_pictures_no_later(
    rate: float,
) -> None:
    demand = Mix(share=1.0, pictures=(1, 2), output=1)
    split, elastic = (
        mean_ttft_s(SPLIT, demand, rate=rate, count=1000, elastic=each, times=stage_times(**LIGHT))
        for each in (None, 2.0)
    )
    assert elastic < split


def test_items_are_spread_over_the_encoders() -> None:
    for seed in range(20):
        request = with_pictures(1.0, 8)
        Simulation(stage_times(**LIGHT), Deployment(encoders=8, engines=1), seed=seed).run(
            [request]
        )
        assert request.ttft_s < 2 * 0.5 + 0.2, "an encoder had more than its share"
