"""When encoders get the items of one request, and what becomes of it without some of them."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from starlette.responses import JSONResponse, Response

from tests.integration.router.conftest import Build
from tests.integration.router.stand_in import Behaviour, Received, answer, refuse, until
from tests.integration.router.test_metadata import bare, describe, kinds, parts
from tests.integration.router.test_requests import BLUE, RED, TEXT, image

GREEN = image(b"green")
LEFT_OUT = "x-epd-items-left-out"


class Counting:
    """What encoders do; counts the jobs that they have at a time.

    Args:
        at_once: Jobs that are waited for before one ends, but not for ever.
    """

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.jobs = self.most = self.at_work = 0

    async def __call__(self, received: Received) -> Response:
        self.jobs += 1
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        await asyncio.sleep(0.02)
        with anyio.move_on_after(5):
            while self.most < self.at_once:
                await asyncio.sleep(0.01)
        self.at_work -= 1
        return await answer(received)


def after_all_jobs(encoding: Counting, jobs: int) -> Behaviour:
    async def generate(received: Received) -> Response:
        await until(lambda: encoding.jobs == jobs and not encoding.at_work)
        return await answer(received)

    return generate


@pytest.mark.parametrize(("order", "most"), [("concurrent", 3), ("sequential_fallback", 1)])
async def test_items_whose_encoder_failed_are_encoded_one_after_the_other_if_asked_so(
    build: Build, order: str, most: int
) -> None:
    """All fail at first, at once; the other encoder has them afterwards."""
    works = Counting(most)
    tried: set[str] = set()

    async def encode(received: Received) -> Response:
        transfer = received.params["transfers"][0]["transfer_id"]
        if transfer in tried:
            return await works(received)
        tried.add(transfer)
        await until(lambda: len(tried) == 3)
        return await refuse(500)(received)

    behaviour = after_all_jobs(works, 3)
    t = await build(encoders=2, encoding=encode, behaviour=behaviour, encode_order=order)
    assert (await t.chat(RED, BLUE, GREEN)).status_code == 200
    await t.until_metric('epd_router_items_total{outcome="retried"}', 3)
    assert (works.jobs, works.most) == (3, most)


async def test_a_request_is_answered_without_an_item_that_cannot_be_had_and_says_so(
    build: Build,
) -> None:
    t = await bare(build, local_encode=False, partial_results=True)
    lost: list[str] = []

    async def all_but_blue(received: Received) -> Response:
        [part] = received.body["messages"][0]["content"]
        if part["image_url"] == BLUE["image_url"]:
            lost.append(part["uuid"])
            return JSONResponse({})
        return await describe()(received)

    t.encoders[0].behaviour = all_but_blue
    response = await t.chat(TEXT, RED, BLUE, GREEN, BLUE)
    assert response.status_code == 200
    assert response.headers[LEFT_OUT] == "1"
    [received] = t.pd.received
    assert kinds(received) == ["text", "image_embeds", "text", "image_embeds", "text"]
    assert parts(received)[2]["text"] == "[image not available]"
    assert len(received.params["transfers"]) == 2
    assert lost[0].encode() not in received.raw
    assert await t.metric('epd_router_items_total{outcome="left_out"}') == 1
    assert await t.metric('epd_router_fallbacks_total{fallback="left_out"}') == 1


async def test_it_may_be_without_all_of_them(build: Build) -> None:
    t = await bare(build, local_encode=False, encoders=0, partial_results=True)
    response = await t.chat(TEXT, RED, BLUE)
    assert (response.status_code, response.headers[LEFT_OUT]) == (200, "2")
    [received] = t.pd.received
    assert (kinds(received), received.params) == (["text"] * 3, None)


async def test_what_is_wrong_with_an_item_is_told_and_not_left_out(build: Build) -> None:
    t = await bare(build, local_encode=False, partial_results=True)
    t.encoders[0].behaviour = refuse(400, "a broken picture")
    response = await t.chat(RED)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "item_refused")
