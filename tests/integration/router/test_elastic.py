"""Items that PD instances encode by choice, over sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from epd_portable.router.hops import ENCODERS, KEY, MAPPING
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import DEADLINE_S, Received, streamed
from tests.integration.router.test_access import keys_file
from tests.integration.router.test_streams import EVENT

ENCODE_S = 0.1


def picture(number: int) -> dict[str, Any]:
    data = "cmVk" + f"{number:04d}"
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def one_by_one() -> Any:
    """Return the behaviour of an encoder that encodes one item at a time."""
    turn = asyncio.Lock()

    async def encode(received: Received) -> Response:
        async with turn:
            await asyncio.sleep(ENCODE_S)
        return JSONResponse({})

    return encode


async def started(build: Build, **settings: Any) -> Topology:
    """Return a topology whose router has seen how long an item takes."""
    t = await build(encoding=one_by_one(), elastic_encode=True, **settings)
    assert (await t.chat(picture(0))).status_code == 200
    await t.until_metric('epd_router_items_total{outcome="encoded"}', 1)
    t.encoders[0].received.clear()
    t.pd.received.clear()
    return t


async def test_an_idle_instance_encodes_the_first_half_of_many_items(build: Build) -> None:
    t = await started(build)
    assert (await t.chat(*map(picture, range(1, 5)))).status_code == 200
    [received] = t.pd.received
    names = [part["uuid"] for part in received.body["messages"][0]["content"]]
    expected = [each["item_uuid"] for each in received.params["transfers"]]
    assert expected == names[-len(expected) :]
    assert 1 <= len(expected) < 4
    assert len(t.encoders[0].received) == len(expected)
    here = await t.metric('epd_router_items_total{outcome="local_first"}')
    assert here == 4 - len(expected)
    assert await t.metric('epd_router_elastic_items_total{reason="idle"}') == here


@pytest.mark.parametrize("header", [ENCODERS, MAPPING, None])
async def test_who_a_hop_names_encodes_whatever_the_sizes(
    build: Build, tmp_path: Path, header: str | None
) -> None:
    t = await started(build, hop_keys_file=keys_file(tmp_path, "h" * 20))
    encoder = t.encoders[0].address
    named = {ENCODERS: encoder, MAPPING: json.dumps(dict.fromkeys("0123", encoder))}
    headers = {KEY: "h" * 20, **({header: named[header]} if header else {})}
    answered = await t.chat(*map(picture, range(1, 5)), headers=headers)
    assert answered.status_code == 200
    here = await t.metric('epd_router_items_total{outcome="local_first"}')
    assert (here == 0) is bool(header)


@pytest.mark.parametrize("settings", [{"local_encode": False}, {"media": "metadata"}])
async def test_who_has_no_media_encodes_none(build: Build, settings: dict[str, Any]) -> None:
    t = await started(build, **settings)
    await t.chat(*map(picture, range(1, 5)))
    assert await t.metric('epd_router_items_total{outcome="local_first"}') == 0


async def test_work_is_counted_when_it_comes_and_owed_until_it_ends(build: Build) -> None:
    may_encode, may_end = asyncio.Event(), asyncio.Event()

    async def encode(received: Received) -> Response:
        await may_encode.wait()
        await asyncio.sleep(ENCODE_S)
        return JSONResponse({})

    behaviour = streamed(may_end, *[EVENT] * 5)
    t = await build(encoding=encode, behaviour=behaviour, elastic_encode=False)
    series = {
        role: (f'epd_router_work_seconds_total{{role="{role}"}}', f'{{role="{role}"}}')
        for role in ("encode", "prefill-decode")
    }

    async def seen(role: str) -> tuple[float, float]:
        came, labels = series[role]
        return await t.metric(came), await t.metric(f"epd_router_owed_seconds{labels}")

    # Of what nobody has done yet it is not known how long it takes.
    first = asyncio.create_task(t.chat(picture(0), stream=True))
    may_encode.set()
    await t.until_metric('epd_router_encode_jobs_total{end="encoded"}', 1)
    await asyncio.sleep(ENCODE_S)
    may_end.set()
    assert (await first).status_code == 200
    await t.until_metric("epd_router_output_tokens_total", 3)
    assert [await seen(role) for role in series] == [(0, 0), (0, 0)]
    tokens = await t.metric("epd_router_prefill_tokens_total")
    assert tokens > 0
    may_encode.clear()
    may_end.clear()
    clients = [
        asyncio.create_task(t.chat(picture(n), picture(n + 10), stream=True)) for n in (1, 2, 3)
    ]
    await t.until_metric('epd_router_instance_in_flight{role="encode"}', 6)
    for role, count in (("encode", 6), ("prefill-decode", 3)):
        came_s, owed_s = await seen(role)
        assert came_s >= count * ENCODE_S
        assert owed_s == pytest.approx(came_s, abs=0.001 * count)
    assert await t.metric("epd_router_prefill_tokens_total") > 3 * tokens
    may_encode.set()
    await t.until_metric('epd_router_encode_jobs_total{end="encoded"}', 7)
    may_end.set()
    assert [each.status_code for each in await asyncio.gather(*clients)] == [200] * 3
    await t.until_metric("epd_router_output_tokens_total", 12)
    assert [(await seen(role))[1] for role in series] == [0, 0]
    sizes = (await t.client.get("/metrics")).text
    assert 'epd_router_work_seconds_total{modality="image",role="encode",size="' in sizes


async def test_new_work_turns_between_the_instances_of_a_pair(build: Build) -> None:
    t = await started(build, pds=2, paired=True, switch_roles=True, behaviour=one_by_one())
    numbers = itertools.count(100)

    async def until_parked(name: str, *content: Any) -> None:
        for part in ("encode-0", "pd-0"):
            line = f'epd_router_instance_parked{{instance="{part}"}}'
            while await t.metric(line) != (part == name):
                parts = [each() if callable(each) else each for each in content]
                found = await asyncio.gather(*(t.chat(*parts) for _ in range(4)))
                assert {each.status_code for each in found} == {200}

    def new_picture() -> dict[str, Any]:
        return picture(next(numbers))

    text = {"type": "text", "text": "hi"}
    async with asyncio.timeout(2 * DEADLINE_S):
        await until_parked("encode-0", text)
        # Pictures of a known size are encoded where they are answered meanwhile.
        here = 'epd_router_elastic_items_total{reason="parked"}'
        assert (await t.chat(new_picture())).status_code == 200
        assert await t.metric(here) == 1
        t.encoders[0].received.clear()
        await until_parked("pd-0", *[new_picture] * 6)
        for each in t.pds:
            each.received.clear()
        assert (await t.chat(text)).status_code == 200
        assert [len(each.received) for each in t.pds] == [0, 1]
