"""One item's way, in the moments that a test over sockets does not hit."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from epd_portable.router.control import ControlChannels, Inbox
from epd_portable.router.delivery import Deliverer, Delivery
from epd_portable.router.media import MediaItem
from epd_portable.router.metrics import Metrics
from epd_portable.router.pool import Instance, Pool
from epd_portable.router.settings import InstanceSettings, RouterSettings
from tests.keyring import keys

DEADLINE_S = 5.0
ENCODER = InstanceSettings(name="encode-0", role="encode", url="http://encode")
PD = InstanceSettings(
    name="pd-0", role="prefill-decode", url="http://pd", control="tcp://127.0.0.1:9"
)


@pytest.mark.parametrize("turns", range(12))
async def test_a_job_that_is_cancelled_as_its_answer_comes_ends(turns: int) -> None:
    """`turns` of the event loop lie between the two."""
    asked, answer = asyncio.Event(), asyncio.Event()

    async def encode(request: httpx.Request) -> httpx.Response:
        asked.set()
        await answer.wait()
        return httpx.Response(200)

    settings = RouterSettings(port=0, model="demo", instances=(ENCODER, PD))
    transport = httpx.MockTransport(encode)
    async with httpx.AsyncClient(base_url=ENCODER.url, transport=transport) as client:
        encoder = Instance(ENCODER, client)
        encoder.mark_up()
        delivery = Delivery(
            item=MediaItem(mm_hash="a", modality="image", part={}),
            transfer_id="t",
            body=b"{}",
            encoder=encoder,
            pd=Instance(PD, client),
            headers={},
        )
        pool, control = Pool(settings), ControlChannels(keys())
        deliverer = Deliverer(settings, pool, control, Metrics())
        job = asyncio.create_task(deliverer.deliver(delivery, asyncio.Event(), Inbox()))
        await asked.wait()
        answer.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        job.cancel()
        await asyncio.wait({job}, timeout=DEADLINE_S)
        assert job.cancelled()
        await control.close()
