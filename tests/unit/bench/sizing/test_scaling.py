from __future__ import annotations

import pytest

from epd_portable.bench.sizing.demand import Demand
from epd_portable.bench.sizing.scaling import scaled, study, workers_needed
from epd_portable.bench.sizing.search import LatencyLimits, SizingQuestion
from epd_portable.bench.sizing.simulate import Deployment, RoutingRules
from tests.unit.bench.sizing.samples import stage_times

UNIT = Deployment(encoders=1, engines=3)


@pytest.mark.parametrize(
    ("unit", "devices", "expected"),
    [
        (UNIT, 100, "25e75pd"),
        (UNIT, 10, "2e8pd"),
        (UNIT, 2, "1e1pd"),
        (Deployment(encoders=7, engines=1), 4, "3e1pd"),
        (Deployment(encoders=0, engines=8), 5, "5 × one process"),
    ],
)
def test_a_ratio_is_kept_as_near_as_whole_instances_can(
    unit: Deployment, devices: int, expected: str
) -> None:
    assert str(scaled(unit, devices)) == expected


def test_processes_of_the_router_are_counted_out_with_room_to_spare() -> None:
    assert workers_needed(69.0, 0.01) == 1
    assert workers_needed(71.0, 0.01) == 2
    assert workers_needed(0.001, 0.01) == 1


def test_a_study_shows_what_grows_and_where_the_router_is_full() -> None:
    router = {"request_s": 0.02, "chunk_s": 0.0, "choice_s": 0.0, "picture_s": 0.0}
    question = SizingQuestion(
        times=stage_times(router={**router, "picture_byte_s": 0.0}),
        demand=Demand(share=0.2, text=(44,), output=(5,)),
        rules=RoutingRules(),
        count=0,
        seed=1,
    )
    limits = LatencyLimits(ttft_s=2.0, ttft_pictures_s=4.0, tpot_s=0.2)
    found = study(
        question, UNIT, limits, sizes=[20, 200], rate_per_device=1.0, report=lambda line: None
    )
    assert found.knees[1] == 35  # 0.7 of a core at 0.02 s each
    assert found.knees[4] == 140
    assert [(bound.value, bound.devices) for bound in found.bounds] == [
        (64, 85),  # of four devices three are prefill+decode instances
        (100, 100),
        (64, 2240),
        (10_000, 10_000),
    ]
    small, one, needed = found.rows
    assert (small.workers, one.workers, needed.workers) == (1, 1, 6)
    assert (small.pairs, needed.pairs) == (5 * 15, 50 * 150)
    assert (small.connections, needed.connections) == (5 * 15, 50 * 64)
    assert (small.reconnected, needed.reconnected) == (0.0, pytest.approx(1 - 64 / 150))
    assert (small.health_age_s, needed.health_age_s) == (1.0, 2.0)
    assert needed.router_cores == pytest.approx(4.0 + 0.04, rel=0.01)
    assert needed.messages == pytest.approx(200 * 0.2 * 4, rel=0.1)
    assert min(small.within, needed.within) > 0.99
    assert one.within < 0.1
    assert one.outcome.busy["router"] > 0.98
    assert needed.outcome.busy["router"] == pytest.approx(4 / 6, abs=0.05)
