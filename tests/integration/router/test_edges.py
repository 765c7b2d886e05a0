"""Edges of the router at which two things meet: odd answers, odd bodies, two endings at once."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from epd_portable.router.server import Router
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import RouterServing, forever
from tests.integration.router.test_faults import opened
from tests.integration.router.test_metadata import describe
from tests.integration.router.test_requests import RED

PICTURE = "data:image/png;base64,cmVk"
IN_OTHER_INTERFACES = {
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]}]
    },
    "/v1/messages": {
        "max_tokens": 1,
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": "cmVk"},
                    }
                ],
            }
        ],
    },
}


@pytest.mark.parametrize("path", IN_OTHER_INTERFACES)
async def test_requests_that_take_no_metadata_go_with_their_media(build: Build, path: str) -> None:
    t = await build(media="metadata", encoding=describe())
    response = await t.client.post(path, json=IN_OTHER_INTERFACES[path])
    assert response.status_code == 200
    [received] = t.pd.received
    assert b"cmVk" in received.raw
    [transfer] = received.params["transfers"]
    assert transfer["media"] is True


# Bodies.


@pytest.mark.parametrize("path", ["/epd/instances", "/epd/nothing"])
async def test_bodies_for_the_operators_addresses_are_small_and_come_in_time(
    build: Build, path: str
) -> None:
    t = await build(encoders=0, body_timeout_s=0.5, registration=True)
    large = await t.client.post(path, content=b"a" * (1 << 20))
    assert large.status_code == 413
    reader, writer = await opened(t)
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{" % path.encode())
    answered = await asyncio.wait_for(reader.read(), 3)
    assert answered.startswith(b"HTTP/1.1 408")
    writer.close()


# Two endings at once.


def inside(t: Topology) -> Router:
    assert isinstance(t.router, RouterServing)
    return t.router.router


@pytest.mark.parametrize("order", ["client first", "instance first"])
@pytest.mark.parametrize("role", ["encode", "prefill-decode"])
async def test_who_leaves_while_an_instance_goes_down_is_not_served_again(
    build: Build, role: str, order: str
) -> None:
    t = await build(encoders=2, pds=2, behaviour=forever, encoding=forever, probe_interval_s=60)
    router = inside(t)
    asked = asyncio.create_task(t.chat(RED))
    instances = t.encoders if role == "encode" else t.pds
    both = t.encoders + t.pds
    while sum(len(each.received) for each in both) < 2:
        await asyncio.sleep(0.01)
    [client] = router.in_flight
    [busy] = [each for each in instances if each.received]
    instance = router.instances.get(busy.name)
    assert instance is not None
    endings = [client.give_up, lambda: instance.seen_gone("test")]
    for ending in endings if order == "client first" else reversed(endings):
        ending()
    with anyio.fail_after(3):
        while router.in_flight or router.exchange._tasks:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    # An encode job may just have been given to the other encoder.
    assert sum(len(each.received) for each in t.pds) == 1
    assert sum(len(each.received) - each.aborted for each in both) == 0
    assert all(each.idle for each in router.instances.all)
    asked.cancel()
