"""Reports of instances about their load, pushed by them.

PD instances report by their control channels as long as this router asks them to. Encode instances
have none: each is polled by HTTP, and answers when its load has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlencode

import anyio
import msgspec

from epd_portable.delivery.instances import Instance
from epd_portable.router.fleet.control import ControlChannels
from epd_portable.router.http.upstream import Upstream, UpstreamError
from epd_portable.wire.messages import (
    LOAD_EVERY_S,
    LOAD_HEARTBEAT_S,
    LOAD_LEASE_S,
    LOAD_PATH,
    LoadReport,
)

WANT_EVERY_S = LOAD_LEASE_S / 5
"""PD instances are asked for reports so often; a message may be lost."""
PAUSE_S = 5.0
"""After an encode instance has not reported."""
TIMEOUT_S = LOAD_HEARTBEAT_S + 2.0


async def follow_load(instance: Instance, control: ControlChannels, upstream: Upstream) -> None:
    """Have an instance report its load, until this is cancelled."""
    if not instance.control:
        await _ask_by_http(instance, upstream)
    while True:
        await instance.wait_up()
        control.want_load(instance.name)
        await asyncio.sleep(WANT_EVERY_S)


async def _ask_by_http(instance: Instance, upstream: Upstream) -> None:
    """Ask an encode instance again and again; each answer comes when there is news."""
    known: dict[str, int] = {}
    while True:
        await instance.wait_up()
        load = None
        with contextlib.suppress(UpstreamError, msgspec.MsgspecError):
            # Its health is for probes.
            url = f"{instance.url}{LOAD_PATH}?{urlencode(known)}"
            status, _, body = await upstream.ask("GET", url, timeout_s=TIMEOUT_S)
            if status == 200:
                load = msgspec.json.decode(body, type=LoadReport)
        if load is None:
            # What comes back may be another process, which reports.
            with anyio.move_on_after(PAUSE_S):
                await instance.wait_down()
            continue
        instance.take_report(load)
        known = {"items": load.items or 0, "pixels": load.pixels or 0}
        await asyncio.sleep(LOAD_EVERY_S)
