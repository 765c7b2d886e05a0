"""One item's way, in the moments that a test over sockets does not hit."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from epd_portable.delivery.fallbacks import RetryBudget
from epd_portable.delivery.instances import EndpointPool
from epd_portable.router.contents.body import Call
from epd_portable.router.contents.media import MediaItem
from epd_portable.router.encode_jobs import Attempt, Delivery, EncodeJobs
from epd_portable.router.fleet.control import ControlChannels, Inbox
from epd_portable.router.http.upstream import Upstream
from epd_portable.router.observability.record import RequestRecord
from epd_portable.router.selector import EndpointSelector
from epd_portable.router.settings import InstanceSettings, RouterSettings
from epd_portable.wire.params import EncodeTransfer
from tests.keyring import keys

DEADLINE_S = 5.0
ENCODER = InstanceSettings(name="encode-0", role="encode", url="http://encode")
PD = InstanceSettings(
    name="pd-0", role="prefill-decode", url="http://pd", control="tcp://127.0.0.1:9"
)


class Asked:
    """Connections to an encoder that answers when it is let."""

    def __init__(self) -> None:
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    async def ask(self, *_: Any, **__: Any) -> tuple[int, dict[str, str], bytes]:
        self.asked.set()
        await self.answer.wait()
        return 200, {}, b"{}"


@pytest.mark.parametrize("turns", range(12))
async def test_a_job_that_is_cancelled_as_its_answer_comes_ends(turns: int) -> None:
    """`turns` of the event loop lie between the two."""
    settings = RouterSettings(port=0, model="demo", instances=(ENCODER, PD))
    instances, control, upstream = EndpointPool(), ControlChannels(keys()), Asked()
    encoder, pd = instances.add(ENCODER), instances.add(PD)
    delivery = Delivery(
        item=MediaItem(item_uuid="a", modality="image", part={}),
        transfer=EncodeTransfer(transfer_id="t", item_uuid="a", consumer=PD.control),
        encoder=encoder,
        body=[b"{}"],
        metadata_only=False,
    )
    jobs = EncodeJobs(settings, cast(Upstream, upstream), control, RetryBudget(), None)
    headers = {"x-request-id": "r"}
    call = Call.untouched("POST", "/v1/chat/completions", b"{}")
    selection = EndpointSelector(instances).start_selection(call, headers, None)
    record = RequestRecord("r", call.path)
    record.note_items([delivery.item])
    one = Attempt(
        use=pd.working(),
        deliveries=(delivery,),
        headers=headers,
        inbox=Inbox(),
        selection=selection,
        record=record,
    )
    job = asyncio.create_task(jobs.deliver(delivery, 0, one))
    await upstream.asked.wait()
    upstream.answer.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    job.cancel()
    await asyncio.wait({job}, timeout=DEADLINE_S)
    assert job.cancelled()
    assert record.items[0].end in ("cancelled", "local")
    (noted,) = record.items[0].jobs
    assert noted.end in ("cancelled", "encoded", "lost")
    await control.close()
