"""With ``media=metadata`` the PD instance gets what encoders say of items; and the fallbacks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import (
    Behaviour,
    Received,
    answer,
    full,
    in_turn,
    once,
    refuse,
    until,
)
from tests.integration.router.test_requests import BLUE, RED, TEXT

GRID = {"image_grid_thw": [1, 4, 4]}


def describe(metadata: Any = GRID, *, name: str = "", namespace: str = "") -> Behaviour:
    """An encode instance that says this of every item, and writes entries of a namespace."""

    async def behave(received: Received) -> Response:
        [part] = received.body["messages"][0]["content"]
        item = {"mm_hash": name or part["uuid"], "modality": "image", "metadata": metadata}
        outcome = {"instance": "e", "items": [item], "namespace": namespace}
        return JSONResponse({"ec_transfer_params": outcome})

    return behave


async def bare(build: Build, **settings: Any) -> Topology:
    """A topology whose PD instances get what encoders say of the items."""
    return await build(encoding=describe(), media="metadata", **settings)


def parts(received: Received) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = received.body["messages"][0]["content"]
    return content


def kinds(received: Received) -> list[str]:
    return [part["type"] for part in parts(received)]


async def test_the_pd_instance_is_asked_after_the_encoders_and_without_media(build: Build) -> None:
    t = await bare(build, encoders=2)
    gate = asyncio.Event()
    for encoder in t.encoders:
        encoder.behaviour = once(gate, describe())
    chat = asyncio.create_task(t.chat(TEXT, RED, BLUE, RED))
    await until(lambda: sum(len(encoder.received) for encoder in t.encoders) == 2)
    assert t.pd.received == []
    gate.set()
    assert (await chat).status_code == 200
    [received] = t.pd.received
    assert kinds(received) == ["text", "image_embeds", "image_embeds", "image_embeds"]
    assert b"base64" not in received.raw
    transfers = received.params["transfers"]
    assert [transfer["item_uuid"] for transfer in transfers] == [
        parts(received)[1]["uuid"],
        parts(received)[2]["uuid"],
    ]
    assert [transfer["media"] for transfer in transfers] == [False, False]
    assert await t.metric('epd_router_fallbacks_total{fallback="original_media"}') == 0


SILENT: dict[str, Behaviour] = {
    "refuses it": refuse(400),
    "fails": refuse(500),
    "says nothing of it": answer,
    "has forgotten its metadata": describe(None),
    "knows of none with this model": describe({}),
}


@pytest.mark.parametrize("behaviour", SILENT.values(), ids=SILENT)
async def test_when_the_encoder_the_media_go_under_a_name_of_their_own(
    build: Build, behaviour: Behaviour
) -> None:
    t = await bare(build)
    t.encoders[0].behaviour = behaviour
    assert (await t.chat(TEXT, RED)).status_code == 200
    [received] = t.pd.received
    assert kinds(received) == ["text", "image_url"]
    assert parts(received)[1]["uuid"].endswith("-media")
    assert parts(received)[1]["image_url"] == RED["image_url"]
    assert await t.metric('epd_router_fallbacks_total{fallback="original_media"}') == 1


async def test_a_modality_without_metadata_does_not_hold_up_the_others(build: Build) -> None:
    t = await bare(build)
    clip = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,Y2xpcA=="}}

    async def only_pictures(received: Received) -> Response:
        is_clip = kinds(received) == ["video_url"]
        item = {"mm_hash": parts(received)[0]["uuid"], "metadata": {} if is_clip else GRID}
        item["modality"] = "video" if is_clip else "image"
        return JSONResponse({"ec_transfer_params": {"instance": "e", "items": [item]}})

    t.encoders[0].behaviour = only_pictures
    for _ in range(2):
        assert (await t.chat(RED, clip)).status_code == 200
    first, second = t.pd.received
    assert kinds(first) == ["image_url", "video_url"]
    assert kinds(second) == ["image_embeds", "video_url"]
    assert [transfer["media"] for transfer in second.params["transfers"]] == [False, True]


async def test_whoever_encodes_too_waits_for_a_full_encoder_if_it_would_need_the_media(
    build: Build,
) -> None:
    t = await bare(build, encoders=1, pds=("encode-prefill-decode",))
    jobs = in_turn(t.encoders, full(50), describe())
    assert (await t.chat(RED, BLUE)).status_code == 200
    assert len(jobs) == 2
    [received] = t.pd.received
    assert sorted(kinds(received)) == ["image_embeds", "image_url"]


@pytest.mark.parametrize(
    ("behaviour", "status"), [(refuse(500), 503), (refuse(400), 400), (describe({}), 503)]
)
async def test_media_are_not_sent_to_an_instance_without_encoder(
    build: Build, behaviour: Behaviour, status: int
) -> None:
    t = await bare(build, local_encode=False)
    t.encoders[0].behaviour = behaviour
    for _ in range(2):
        response = await t.chat(RED)
        assert response.status_code == status
        assert ("retry-after" in response.headers) is (status == 503)
    assert t.pd.received == []
