from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from epd_portable.bench.mix import Mix
from epd_portable.bench.sizing.search import (
    LatencyLimits,
    RatedDeployment,
    SizingQuestion,
    best_rate,
    deployments,
    recommend,
    search,
)
from epd_portable.bench.sizing.simulate import Deployment
from tests.unit.bench.sizing.samples import LIGHT, stage_times

LIMITS = LatencyLimits(ttft_s=2.0, ttft_pictures_s=4.0, tpot_s=0.1)


def question(**changes: Any) -> SizingQuestion:
    known: dict[str, Any] = {
        "times": stage_times(),
        "workload": Mix(share=0.5, text=44, output=11),
        "elastic": False,
        "count": 1000,
        "seed": 1,
    }
    return SizingQuestion(**known | changes)


def test_every_way_to_use_the_devices_is_tried() -> None:
    assert [str(each) for each in deployments(4)] == [
        "4 × one process",
        "1e3pd",
        "2e2pd",
        "3e1pd",
    ]
    assert [str(each) for each in deployments(1)] == ["1 × one process"]


def test_a_capacity_is_what_instances_have_by_what_a_request_takes() -> None:
    times = stage_times(
        prefill={"base_s": 0.0, "per_token_s": 0.001},
        decode={"base_s": 0.0, "per_sequence_s": 0.01},
    )
    demand = Mix(share=0.5, pictures=(1, 3), text=44, output=11)
    asked = question(times=times, workload=demand)
    engine_s = 0.044 + 0.256 + 0.1  # one picture a request in the mean
    both_s = engine_s + 0.5
    assert asked.capacity(Deployment(encoders=0, engines=2)) == pytest.approx(2 / both_s)
    assert asked.capacity(Deployment(encoders=1, engines=2)) == pytest.approx(1 / 0.5)
    assert asked.capacity(Deployment(encoders=9, engines=2)) == pytest.approx(2 / engine_s)
    elastic = replace(asked, elastic=True)
    assert elastic.capacity(Deployment(encoders=1, engines=2)) == pytest.approx(3 / both_s)
    assert elastic.capacity(Deployment(encoders=9, engines=2)) == pytest.approx(2 / engine_s)


def test_the_limits_hold_at_the_rate_that_is_found_and_not_much_above_it() -> None:
    asked = question(times=stage_times(**LIGHT))
    deployment = Deployment(encoders=1, engines=1)
    found = best_rate(asked, deployment, LIMITS)
    assert LIMITS.broken(asked.simulate(deployment, found.rate)) == ""
    assert LIMITS.broken(asked.simulate(deployment, found.rate * 1.011)) == found.limit
    assert found.limit == "TTFT of pictures"
    assert max(found.outcome.busy, key=found.outcome.busy.__getitem__) == "encode"
    assert 0.5 < found.outcome.busy["encode"] < 1


def test_a_limit_that_no_rate_keeps_gives_no_rate() -> None:
    found = best_rate(question(), Deployment(encoders=1, engines=1), replace(LIMITS, ttft_s=0.01))
    assert found.rate == 0
    assert found.limit == "TTFT of text"


def candidate(deployment: Deployment, rate: float) -> RatedDeployment:
    outcome = question(count=100).simulate(deployment, 0.5)
    return RatedDeployment(deployment=deployment, rate=rate, outcome=outcome, limit="TTFT of text")


@pytest.mark.parametrize(
    ("replicas", "split", "words"),
    [
        (10.0, 20.0, "Disaggregate: 1 encode and 2 prefill+decode instances (1 to 2) serve 20 "),
        (10.0, 20.0, "against 10 of 3 × one process (2.00 times)."),
        (10.0, 10.4, "Do not disaggregate: 3 × one process serve 10 requests/s"),
        (10.0, 10.4, "against 10.4 of 1e2pd (1.04 times)"),
        (0.0, 5.0, "against 0 of 3 × one process (which keep none)"),
        (0.0, 0.0, "No way to use 3 devices keeps the limits"),
    ],
)
def test_the_recommendation_says_whether_to_split_and_what_it_is_worth(
    replicas: float, split: float, words: str
) -> None:
    candidates = [
        candidate(Deployment(encoders=0, engines=3), replicas),
        candidate(Deployment(encoders=1, engines=2), split),
    ]
    assert words in recommend(candidates)


def test_long_encodes_and_tight_tokens_call_for_a_split_and_texts_alone_do_not() -> None:
    tight = replace(LIMITS, tpot_s=0.06)
    pictures = search(question(times=stage_times(**LIGHT)), 3, tight)
    assert recommend(pictures).startswith("Disaggregate: ")
    texts = question(times=stage_times(**LIGHT), workload=Mix(share=0.0, text=44, output=11))
    assert recommend(search(texts, 3, tight)).startswith("Do not disaggregate")
