"""Whatever vLLM's processor cache in the front keeps or lets go, engines get an item's pixels."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import generate_latest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason

from epd_portable.demo.pictures import Picture, draw
from epd_portable.front.client import SplitClient
from epd_portable.front.request import UnavailableError
from epd_portable.front.server import Front
from tests.integration.front.played_front import PICTURE, Engine
from tests.metrics_page import total
from tests.waiting import until_async

SIDE, LARGE = 112, 560
"""Sides of images; a few of the first fit into the cache, and none of the second."""
ROLES = {"encode": "e-0", "prefill-decode": "pd-0"}
TAKES_S = 0.05


async def ask(front: Front, name: str, *pictures: Picture) -> None:
    prompt = {
        "prompt": PICTURE * len(pictures) + "What is it?",
        "multi_modal_data": {"image": [each.image for each in pictures]},
    }
    asked = [each async for each in front.generate(prompt, SamplingParams(), name)]
    assert asked[-1].finished


async def test_engines_get_the_pixels_of_every_item(client: SplitClient, front: Front) -> None:
    async def sent(seed: int, side: int) -> tuple[str, Any]:
        encoder, pd = Engine(client, "e-0"), Engine(client, "pd-0")
        await ask(front, f"{seed}-{side}", draw(seed, side))
        (job,), (request,) = encoder.sent, pd.sent
        (feature,), (bare,) = job.mm_features, request.mm_features
        assert set(bare.data) == {"image_grid_thw"}
        return feature.identifier, feature.data["pixel_values"].data

    seen: dict[tuple[int, int], tuple[str, Any]] = {}
    small = [(seed, SIDE) for seed in range(8)]
    # All are evicted once; what is too large comes between, twice, and before what is kept.
    for each in [*small, (9, LARGE), *small, (9, LARGE), small[-1], (9, LARGE), small[0]]:
        identifier, pixels = await sent(*each)
        first = seen.setdefault(each, (identifier, pixels))
        assert (identifier, pixels.tolist()) == (first[0], first[1].tolist())
    assert len({identifier for identifier, _ in seen.values()}) == len(seen)


async def test_backlog_counts_work_until_request_ends(client: SplitClient, front: Front) -> None:
    def seen(role: str) -> tuple[float, float]:
        page = generate_latest(client.metrics.registry).decode()
        came = total(page, f'epd_front_work_seconds_total{{role="{role}"}}')
        return came, total(page, f'epd_front_backlog_seconds{{role="{role}"}}')

    engines = [Engine(client, name) for name in ROLES.values()]
    for each in engines:
        each.takes_s = TAKES_S
    await ask(front, "first", draw(1, SIDE))
    assert [*map(seen, ROLES)] == [(0, 0), (0, 0)]
    for each in engines:
        each.may_end.clear()
    asking = asyncio.gather(ask(front, "a", draw(2, SIDE)), ask(front, "b", draw(3, SIDE)))
    await until_async(lambda: len(engines[0].sent) >= 3)
    for role in ROLES:
        came_s, backlog_s = seen(role)
        assert came_s >= (2 * TAKES_S if role == "encode" else 0.001)
        assert backlog_s == pytest.approx(came_s, abs=0.002)
    for each in engines:
        each.may_end.set()
    await asking
    assert [seen(role)[1] for role in ROLES] == [0, 0]


async def test_failed_choice_cancels_the_other_choices(client: SplitClient, front: Front) -> None:
    engine = Engine(client, "pd-0")
    engine.may_end.clear()
    answers = front.generate({"prompt": "What is it?"}, SamplingParams(n=3), "several")
    asking = asyncio.create_task(anext(answers))
    await until_async(lambda: len(engine.sent) >= 3)
    first, *others = (each.request_id for each in engine.sent)
    while not asking.done():  # It is sent again before.
        engine.says(
            engine.sent[-1].request_id if len(engine.sent) > 3 else first, FinishReason.ERROR
        )
        await asyncio.sleep(0.001)
    with pytest.raises(UnavailableError):
        await asking
    assert not client._open
    await asyncio.sleep(0)
    assert set(others) <= set(engine.aborted)
