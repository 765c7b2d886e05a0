from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd_portable.bench.sizing.simulate import Deployment, Outcome, RoutingRules, Simulation
from epd_portable.bench.sizing.stages import StageTimes
from epd_portable.bench.sizing.workload import PictureItem, SimulatedRequest, Workload
from tests.unit.bench.sizing.samples import LIGHT, stage_times

SPLIT = Deployment(encoders=1, engines=1)
REPLICA = Deployment(encoders=0, engines=1)


def simulate(
    deployment: Deployment,
    demand: Workload,
    *,
    rate: float,
    count: int = 2000,
    rules: RoutingRules | None = None,
    times: StageTimes | None = None,
    seed: int = 1,
) -> Outcome:
    times = times or stage_times()
    requests = demand.requests(times, rate=rate, count=count, seed=seed)
    return Simulation(times, deployment, rules or RoutingRules(), seed=seed).run(requests)


def with_pictures(arrival_s: float, count: int, output: int = 1) -> SimulatedRequest:
    items = [PictureItem(pixels=448**2, embeddings=256) for _ in range(count)]
    return SimulatedRequest(arrival_s=arrival_s, text_tokens=44, output_tokens=output, items=items)


@settings(max_examples=60, deadline=None)
@given(
    encoders=st.integers(0, 4),
    engines=st.integers(1, 20),
    rules=st.builds(
        RoutingRules,
        routers=st.integers(1, 3),
        elastic_threshold=st.sampled_from([None, 1.0, 4.0]),
    ),
    demand=st.builds(
        Workload,
        share=st.floats(0, 1),
        pictures=st.sampled_from([(1,), (1, 4)]),
        size=st.sampled_from([(112,), (448, 1024)]),
        output=st.sampled_from([(1,), (2, 30)]),
        burst=st.sampled_from([0.2, 1.0, 8.0]),
    ),
    rate=st.floats(0.1, 1000),
    seed=st.integers(0, 1000),
)
def test_every_request_ends_once_and_every_picture_is_encoded_once(
    encoders: int,
    engines: int,
    rules: RoutingRules,
    demand: Workload,
    rate: float,
    seed: int,
) -> None:
    times = stage_times(
        front_end={"request_s": 0.001, "picture_s": 0.01},
        router={},
        engine={"max_num_batched_tokens": 300, "max_num_seqs": 4, "max_encoder_tokens": 100},
    )
    outcome = simulate(
        Deployment(encoders=encoders, engines=engines),
        demand,
        rate=rate,
        count=100,
        rules=rules,
        times=times,
        seed=seed,
    )
    assert len(outcome.requests) == 100
    for request in outcome.requests:
        assert request.arrival_s < request.first_token_s <= request.end_s
        assert all(item.encoded for item in request.items)
    if encoders:
        pictures = sum(len(request.items) for request in outcome.requests)
        assert outcome.transferred + outcome.local_items == pictures
    assert all(0 <= share <= 1 + 1e-9 for share in outcome.busy.values())


def test_the_same_seed_gives_the_same_outcome_and_another_one_another() -> None:
    demand = Workload(share=0.3)
    deployment = Deployment(encoders=2, engines=20)
    one, two, other = (simulate(deployment, demand, rate=10, seed=seed).kinds for seed in (1, 1, 2))
    assert one == two
    assert one != other


def test_pictures_at_one_encoder_wait_as_long_as_theory_says() -> None:
    """M/D/1 at a load of 0.6 with encodes of 0.5 s: 0.375 s in the mean."""
    times = stage_times(
        prefill={"base_s": 0.0, "per_token_s": 1e-9}, decode={"base_s": 0.0, "per_sequence_s": 0.0}
    )
    demand = Workload(share=1.0, output=(1,))
    outcome = simulate(SPLIT, demand, rate=1.2, count=30_000, times=times)
    mean_s = sum(request.ttft_s for request in outcome.requests) / len(outcome.requests)
    assert mean_s == pytest.approx(0.5 + 0.375, rel=0.03)
    assert outcome.busy["encode"] == pytest.approx(outcome.rate * 0.5, rel=0.01)
    # Little's law: who waits, in the mean, is the rate times the wait.
    assert outcome.queued["encode"] == pytest.approx(1.2 * 0.375, rel=0.05)


def test_one_process_stalls_tokens_while_it_encodes_and_a_split_does_not() -> None:
    demand = Workload(share=0.2, text=(44,), output=(40,))
    replica = simulate(REPLICA, demand, rate=0.5)
    split = simulate(SPLIT, demand, rate=0.5)
    assert replica.longest_stall_s > 0.5 > split.longest_stall_s
    assert replica.kinds["text"].tpot_p99 > 1.2 * split.kinds["text"].tpot_p99
    assert replica.kinds["text"].ttft_p99 > 1.5 * split.kinds["text"].ttft_p99


def test_two_pictures_are_encoded_at_once_when_the_engine_may_encode_one() -> None:
    def ttft_s(rules: RoutingRules) -> float:
        request = with_pictures(1.0, 2)
        Simulation(stage_times(), SPLIT, rules, seed=1).run([request])
        return request.ttft_s

    assert ttft_s(RoutingRules()) == pytest.approx(1.0 + 0.1 + 0.3)
    assert ttft_s(RoutingRules(elastic_threshold=1.0)) == pytest.approx(0.5 + 0.1 + 0.256 + 0.4)
    # Half the time is what an idle engine's encoding must be worth.
    assert ttft_s(RoutingRules(elastic_threshold=4.0)) == ttft_s(RoutingRules())


def test_an_engine_that_computes_for_others_encodes_only_what_would_take_so_much_longer() -> None:
    def local(threshold: float) -> int:
        early, late = with_pictures(0.0, 1, output=1000), with_pictures(2.0, 4)
        rules = RoutingRules(elastic_threshold=threshold)
        return Simulation(stage_times(), SPLIT, rules, seed=1).run([early, late]).local_items

    # Four encodes of 0.5 s in a row against one, then three against two.
    assert [local(threshold) for threshold in (1.0, 2.0, 5.0)] == [2, 1, 0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9])
def test_where_nobody_generates_encoding_where_it_is_sooner_makes_pictures_no_later(
    seed: int, rate: float
) -> None:
    demand = Workload(share=1.0, pictures=(1, 2), output=(1,))
    times = stage_times(**LIGHT)
    ttft = [
        sum(request.ttft_s for request in outcome.requests)
        for outcome in (
            simulate(SPLIT, demand, rate=rate, count=1000, seed=seed, rules=rules, times=times)
            for rules in (RoutingRules(), RoutingRules(elastic_threshold=2.0))
        )
    ]
    assert ttft[1] < ttft[0]


def test_items_are_spread_over_the_encoders() -> None:
    for seed in range(20):
        request = with_pictures(1.0, 8)
        Simulation(
            stage_times(**LIGHT), Deployment(encoders=8, engines=1), RoutingRules(), seed=seed
        ).run([request])
        assert request.ttft_s < 2 * 0.5 + 0.2, "an encoder had more than its share"


def test_a_full_router_is_what_is_waited_for() -> None:
    times = stage_times(
        router={"request_s": 1.0, "chunk_s": 0.0},
    )
    demand = Workload(share=0.0, output=(1,))
    one = simulate(REPLICA, demand, rate=2.0, count=100, times=times)
    four = simulate(
        REPLICA, demand, rate=2.0, count=100, times=times, rules=RoutingRules(routers=8)
    )
    assert one.duration_s == pytest.approx(100, abs=2)
    assert one.queued["router"] > 20 > 5 > four.queued["router"]


def test_bursts_make_queues() -> None:
    smooth, bursts = (
        simulate(SPLIT, Workload(share=1.0, output=(1,), burst=burst), rate=1.0).queued["encode"]
        for burst in (0.05, 8.0)
    )
    assert bursts > 10 * smooth
