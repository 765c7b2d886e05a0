"""Before clients' requests every instance has answered first ones, and every pair has met."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from epd_portable.wire.messages import NackCode
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import Behaviour, Received, once, refuse
from tests.integration.router.test_metadata import describe
from tests.integration.router.test_requests import RED, TEXT
from tests.keyring import Signed


def transferring(source: str = "transfer") -> Behaviour:
    """Answer as a prefill+decode instance that had its items from the encoder asked first."""

    async def behave(received: Received) -> Response:
        items = [
            {
                "mm_hash": t["item_uuid"],
                "source": source,
                "encoder": t.get("encoder", ""),
                "path": "shm",
            }
            for t in (received.params or {"transfers": []})["transfers"]
        ]
        return JSONResponse({"ec_transfer_params": {"instance": "pd", "items": items}})

    return behave


def pairs(t: Topology) -> list[tuple[str, str]]:
    """Return ``(encoder, prefill+decode instance)`` of every item that was sent over a pair."""
    return [
        (transfer["encoder"], pd.name)
        for pd in t.pds
        for received in pd.received
        if received.params
        for transfer in received.params["transfers"]
    ]


def ids(received: Received) -> list[str]:
    return [transfer["transfer_id"] for transfer in received.params["transfers"]]


def is_up(instances: dict[str, Any]) -> bool:
    return all(instance["state"] == "up" for instance in instances.values())


async def test_every_pair_meets_once_before_it_serves(build: Build) -> None:
    t = await build(encoders=2, pds=2, warm_up=True, behaviour=transferring())
    await t.until_health(is_up)
    assert sorted(pairs(t)) == [(encoder.name, pd.name) for encoder in t.encoders for pd in t.pds]
    jobs = [i for e in t.encoders for r in e.received if r.params for i in ids(r)]
    requests = [i for pd in t.pds for r in pd.received if r.params for i in ids(r)]
    assert sorted(jobs) == sorted(requests)
    # No two pictures are the same, so no cache has them.
    urls = [
        part["image_url"]["url"]
        for encoder in t.encoders
        for received in encoder.received
        for part in received.body["messages"][0]["content"]
    ]
    assert len(set(urls)) == len(urls) == 6


async def test_a_model_that_takes_no_pictures_is_shown_clips(build: Build) -> None:
    hears = transferring()

    async def deaf_to_pictures(received: Received) -> Response:
        seen = b"image_url" in received.raw
        return await (refuse(400)(received) if seen else hears(received))

    t = await build(warm_up=True, behaviour=deaf_to_pictures, encoding=deaf_to_pictures)
    health = await t.until_health(is_up)
    assert not any("problem" in seen for seen in health.json()["instances"].values())
    assert pairs(t) == [("encode-0", "pd-0")]


async def test_an_instance_without_the_encoder_expects_the_engines_own_name(build: Build) -> None:
    t = await build(
        warm_up=True,
        behaviour=transferring(),
        encoding=describe(name="engine's"),
        media="metadata",
        local_encode=False,
    )
    await t.until_health(is_up)
    expected = t.pd.received[-1].params["transfers"]
    assert [(each["item_uuid"], each["media"]) for each in expected] == [("engine's", False)]


async def test_clients_are_told_to_wait_until_then(build: Build) -> None:
    release = asyncio.Event()
    t = await build(warm_up=True, behaviour=once(release, transferring()))
    await t.pd.until(lambda pd: len(pd.received) == 1)
    response = await t.chat(TEXT)
    assert response.status_code == 503
    assert "pd-0: joining" in response.json()["error"]["message"]
    health = await t.health()
    assert health.status_code == 503
    assert health.json()["instances"]["pd-0"]["healthy"]
    release.set()
    await t.until_health(is_up)
    assert (await t.chat(RED)).status_code == 200


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (refuse(400, "too small a picture"), "answered a first request 400"),
        (transferring("local"), "had it by local"),
        (refuse(500), "answered a first request 500"),
    ],
)
async def test_what_does_not_answer_as_it_should_is_named_and_serves_all_the_same(
    build: Build, behaviour: Behaviour, words: str
) -> None:
    t = await build(warm_up=True, behaviour=behaviour)
    health = await t.until_health(is_up)
    problems = [instance.get("problem", "") for instance in health.json()["instances"].values()]
    assert any(words in problem for problem in problems)


async def test_refused_pair_is_named_with_its_reason_at_once(build: Build) -> None:
    built: asyncio.Future[Topology] = asyncio.get_running_loop().create_future()
    never = asyncio.Event()
    detail = "encode-0 differs in the dtype (--dtype)"

    async def refusing_items(received: Received) -> Response:
        if received.params:
            t = await built
            await t.control.refuse(received.params, NackCode.INCOMPATIBLE, detail)
            await never.wait()
        return await transferring()(received)

    built.set_result(await build(warm_up=True, behaviour=refusing_items))
    health = await built.result().until_health(is_up)
    problems = [each.get("problem", "") for each in health.json()["instances"].values()]
    assert f"pd-0 refuses the items of encode-0: {detail}" in problems


async def test_one_that_dies_over_its_first_request_gets_them_again_when_it_is_back(
    build: Build,
) -> None:
    answer, died = transferring(), False

    async def broken() -> AsyncIterator[bytes]:
        yield b"{"
        raise ConnectionResetError

    async def dies_once(received: Received) -> Response:
        nonlocal died
        if not died:
            died = True
            return StreamingResponse(broken())
        return await answer(received)

    t = await build(warm_up=True, behaviour=dies_once)
    await t.until_health(is_up)
    assert [r.params is None for r in t.pd.received][-3:] == [True, True, False]
    assert len(t.pd.received) == 4


async def test_one_that_was_gone_meets_everybody_again_before_it_gets_work(build: Build) -> None:
    t = await build(encoders=2, warm_up=True, behaviour=transferring())
    await t.until_health(is_up)
    back = t.encoders[1]
    await back.serving.stop()
    await t.until_health(lambda seen: seen[back.name]["state"] == "down")
    before, release = len(back.received), asyncio.Event()
    back.behaviour = once(release, back.behaviour)
    await back.serving.start()
    await back.until(lambda back: len(back.received) > before)
    for _ in range(4):
        assert (await t.chat(RED)).status_code == 200
    assert len(back.received) == before + 1
    release.set()
    await t.until_health(is_up)
    assert [r.params is None for r in back.received[before:]] == [True, False]


async def test_a_silent_partner_holds_nobody_up(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_portable.router.warm_up.PATIENCE_S", 0.5)
    answer, ever = transferring(), asyncio.Event()
    silent = 0

    async def silent_over_one(received: Received) -> Response:
        nonlocal silent
        silent += received.params is not None
        if received.params and silent == 1:
            await ever.wait()
        return await answer(received)

    t = await build(pds=2, warm_up=True, behaviour=silent_over_one)
    health = await t.until_health(is_up)
    problems = [each.get("problem", "") for each in health.json()["instances"].values()]
    assert [problem for problem in problems if "has not met" in problem]
    assert len(pairs(t)) == 2
    assert (await t.chat(RED)).status_code == 200
    ever.set()
    await t.until_health(lambda seen: not any("problem" in each for each in seen.values()))


async def test_one_that_goes_down_while_it_meets_others_is_introduced_to_them_again(
    build: Build,
) -> None:
    answer = transferring()

    async def waits_over_items(received: Received) -> Response:
        if received.params:
            await asyncio.Event().wait()
        return await answer(received)

    t = await build(warm_up=True, behaviour=waits_over_items)
    await t.pd.until(lambda pd: len(pd.received) == 3)
    await t.pd.serving.stop()
    t.pd.behaviour = answer
    await t.until_health(lambda seen: seen["pd-0"]["state"] == "down")
    await t.pd.serving.start()
    await t.until_health(is_up)
    assert [r.params is None for r in t.pd.received[3:]] == [True, True, False]


async def test_one_that_drains_is_introduced_when_it_resumes(build: Build) -> None:
    t = await build(encoders=2, warm_up=True, behaviour=transferring())
    await t.until_health(is_up)
    drained, signed = t.encoders[1], Signed()
    path = f"/epd/instances/{drained.name}"
    assert (await t.client.post(f"{path}/drain", auth=signed)).status_code == 202
    await drained.serving.stop()
    await t.until_health(lambda seen: not seen[drained.name]["healthy"])
    await drained.serving.start()
    await t.until_health(lambda seen: seen[drained.name]["healthy"])
    before = len(drained.received)
    assert (await t.chat(RED)).status_code == 200
    assert len(drained.received) == before
    resumed = await t.client.post(f"{path}/resume", auth=signed)
    assert (resumed.status_code, resumed.json()["state"]) == (200, "joining")
    await t.until_health(is_up)
    assert [r.params is None for r in drained.received[before:]] == [True, False]
