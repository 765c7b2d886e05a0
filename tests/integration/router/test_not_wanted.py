"""What nobody asks for any more: prefill+decode instances are told, and calls to encoders end."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from starlette.responses import Response

from epd_portable.wire.messages import NotWanted
from epd_portable.wire.params import PrefillParams, read_params
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import (
    DEADLINE_S,
    Received,
    StandIn,
    answer,
    forever,
    refuse,
    streamed,
)
from tests.integration.router.test_metadata import describe
from tests.integration.router.test_requests import BLUE, RED, TEXT
from tests.integration.router.test_warm_up import is_up


@pytest.fixture
def build_connected(build: Build) -> Build:
    """A topology whose router has reached the control channel: what is sent before that is lost."""

    async def make(**settings: object) -> Topology:
        t = await build(**settings)
        await t.control.until_connected()
        return t

    return make


def transfers_of(pd: StandIn) -> list[str]:
    return [
        each.transfer_id for each in read_params(pd.received[-1].params, PrefillParams).transfers
    ]


async def told(t: Topology, count: int) -> set[str]:
    """Return the transfers of the next messages, all of which say that they are not wanted."""
    messages = [(await t.control.receive())[1] for _ in range(count)]
    assert {type(message) for message in messages} == {NotWanted}
    return {message.transfer_id for message in messages}


@pytest.mark.parametrize("status", [400, 404, 429, 500])
async def test_a_refused_request_s_items_are_not_wanted_and_their_encoding_ends(
    build_connected: Build, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_portable.router.exchange.JOB_GRACE_S", 10 * DEADLINE_S)
    t = await build_connected()
    t.encoders[0].behaviour = forever

    async def generate(received: Received) -> Response:
        await t.encoders[0].until(lambda encoder: len(encoder.received) == 2)
        return await refuse(status)(received)

    t.pd.behaviour = generate
    assert (await t.chat(RED, TEXT, BLUE)).status_code == status
    assert await told(t, 2) == set(transfers_of(t.pd))
    await t.encoders[0].until(lambda encoder: encoder.aborted == 2)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_wants_its_items_no_more(
    build_connected: Build, streamed: bool
) -> None:
    t = await build_connected()
    t.encoders[0].behaviour = forever
    t.pd.behaviour = forever
    chat = asyncio.create_task(t.chat(RED, BLUE, stream=streamed))
    await t.pd.until(lambda pd: len(pd.received) == 1)
    await t.encoders[0].until(lambda encoder: len(encoder.received) == 2)
    chat.cancel()
    assert await told(t, 2) == set(transfers_of(t.pd))
    await t.pd.until(lambda pd: pd.aborted == 1)
    await t.encoders[0].until(lambda encoder: encoder.aborted == 2)
    await t.until_metric('epd_router_client_disconnects_total{endpoint="/v1/chat/completions"}', 1)
    assert await t.metric('epd_router_items_total{outcome="cancelled"}') == 2


async def test_a_client_that_leaves_before_the_instance_was_asked_wants_its_items_no_more(
    build_connected: Build,
) -> None:
    t = await build_connected(encoding=describe(), media="metadata")
    t.encoders[0].behaviour = forever
    chat = asyncio.create_task(t.chat(RED))
    await t.encoders[0].until(lambda encoder: len(encoder.received) == 1)
    chat.cancel()
    [transfer] = t.encoders[0].received[0].params["transfers"]
    assert await told(t, 1) == {transfer["transfer_id"]}
    assert t.pd.received == []


async def test_a_client_that_leaves_a_stream_wants_its_items_no_more(
    build_connected: Build,
) -> None:
    t = await build_connected(behaviour=streamed(b"data: {}\n\n", asyncio.Event()))
    body = {"messages": [{"role": "user", "content": [RED]}], "stream": True}
    async with t.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert await anext(response.aiter_bytes())
    assert await told(t, 1) == set(transfers_of(t.pd))


async def test_what_is_sent_again_by_other_transfers_is_not_wanted_by_the_first(
    build_connected: Build,
) -> None:
    t = await build_connected()

    async def generate(received: Received) -> Response:
        if len(t.pd.received) == 2:
            return await answer(received)
        asyncio.get_running_loop().call_soon(t.pd.serving.drop_connections)
        return await forever(received)

    t.pd.behaviour = generate
    assert (await t.chat(RED)).status_code == 200
    [first], [second] = (
        read_params(received.params, PrefillParams).transfers for received in t.pd.received
    )
    assert first.transfer_id != second.transfer_id
    assert await told(t, 1) == {first.transfer_id}


async def test_an_answered_request_s_items_were_wanted(build_connected: Build) -> None:
    t = await build_connected()
    assert (await t.chat(RED)).status_code == 200
    t.pd.behaviour = refuse(400)
    assert (await t.chat(BLUE)).status_code == 400
    assert await told(t, 1) == set(transfers_of(t.pd)), "of the second request, and of no other"


async def test_a_client_is_answered_also_where_nobody_can_be_told(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    t = await build(behaviour=refuse(400))
    t.controls.pop().close()
    # Until the router has seen the connection end it sends to nobody.
    with anyio.fail_after(DEADLINE_S):
        while "control channel of pd-0 is away" not in caplog.text:
            assert (await t.chat(RED)).status_code == 400


async def test_an_item_of_a_first_meeting_that_failed_is_not_wanted(build: Build) -> None:
    connected = asyncio.Event()

    async def generate(received: Received) -> Response:
        if received.params is None:
            return await answer(received)
        await connected.wait()
        return await refuse(400)(received)

    t = await build(warm_up=True, behaviour=generate)
    await t.control.until_connected()
    connected.set()
    await t.until_health(is_up)
    assert await told(t, 1) == set(transfers_of(t.pd))
