"""One item's way, in the moments that a test over sockets does not hit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from epd_portable.placement.fallbacks import RetryBudget
from epd_portable.placement.instances import EndpointPool
from epd_portable.router.client_exchange import ClientExchange
from epd_portable.router.contents.body import Call
from epd_portable.router.contents.media import MediaItem
from epd_portable.router.encode_jobs import Attempt, Delivery, EncodeJobs
from epd_portable.router.fleet.control import ControlChannels, Inbox
from epd_portable.router.http.server_connection import ClientRequest
from epd_portable.router.http.upstream import Upstream
from epd_portable.router.selector import Selection
from epd_portable.router.settings import RouterSettings
from epd_portable.wire.params import EncodeTransfer
from tests.keyring import keys
from tests.unit.builders import instance_settings
from tests.unit.router.transport import Transport

DEADLINE_S = 5.0
ENCODERS = [instance_settings(f"encode-{n}", "encode") for n in range(2)]
PD = instance_settings("pd-0", "prefill-decode")


class Scene:
    """An item of a request, and connections to encoders that answer when they are let."""

    def __init__(self, *statuses: int) -> None:
        self.asked, self.answer = asyncio.Event(), asyncio.Event()
        self._statuses = list(statuses)
        pool = EndpointPool()
        self.encoders = [pool.add(each) for each in ENCODERS[: len(statuses)]]
        for each in self.encoders:
            each.seen_well()
        self.control = ControlChannels(keys())
        self.delivery = Delivery(
            index=0,
            item=MediaItem(item_uuid="a", modality="image", part={}),
            transfer=EncodeTransfer(transfer_id="t", item_uuid="a", consumer=PD.control),
            encoder=self.encoders[0],
            body=[b"{}"],
        )
        call = Call.untouched("POST", "/v1/chat/completions", b"{}")
        asked = ClientRequest(
            Transport(), 80, "POST", call.path.encode(), {}, version="1.1", keeps=True
        )
        client = ClientExchange(asked, (), {})
        self.record = client.record
        self.record.note_items([self.delivery.item])
        self.attempt = Attempt(
            call=call,
            out=client,
            use=pool.add(PD).working(),
            deliveries=(self.delivery,),
            headers={"x-request-id": "r"},
            inbox=Inbox(),
            selection=Selection(pool, call, "r", None),
        )
        of_router = RouterSettings(port=0, model="demo", instances=(*ENCODERS, PD))
        self._jobs = EncodeJobs(of_router, cast(Upstream, self), self.control, RetryBudget(), None)

    async def fetch(self, *_: Any, **__: Any) -> tuple[int, dict[str, str], bytes]:
        self.asked.set()
        await self.answer.wait()
        return self._statuses.pop(0), {}, b"{}"

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._jobs.deliver(self.delivery, self.attempt))


@pytest.fixture
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    made = Scene(*request.param)
    yield made
    await made.control.close()


@pytest.mark.parametrize("scene", [(200,)], indirect=True)
@pytest.mark.parametrize("turns", range(12))
async def test_a_job_that_is_cancelled_as_its_answer_comes_ends(scene: Scene, turns: int) -> None:
    """`turns` of the event loop lie between the two."""
    job = scene.start()
    await scene.asked.wait()
    scene.answer.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    job.cancel()
    await asyncio.wait({job}, timeout=DEADLINE_S)
    assert job.cancelled()
    assert scene.record.items[0].end in ("cancelled", "local")
    (noted,) = scene.record.items[0].jobs
    assert noted.end in ("cancelled", "encoded", "lost")


@pytest.mark.parametrize("scene", [(500, 200)], indirect=True)
async def test_the_encoder_that_has_the_item_must_not_leave_before_the_answer(scene: Scene) -> None:
    scene.answer.set()
    job = scene.start()
    item = scene.record.items[0]
    while len(item.jobs) < 2 or not item.jobs[1].end:
        await asyncio.sleep(0)
    failed, has_it = scene.encoders
    assert (item.jobs[0].end, item.jobs[1].end) == ("error", "encoded")
    assert failed.idle and not has_it.idle
    scene.attempt.note_answer_began()
    await asyncio.wait_for(job, DEADLINE_S)
    assert has_it.idle and item.end == "retried"
