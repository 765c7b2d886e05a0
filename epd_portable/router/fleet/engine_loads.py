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

from epd_portable.delivery.instances import EndpointPool, Instance
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


class EngineLoads:
    """Asks instances for reports of their load, and takes them in."""

    def __init__(
        self, instances: EndpointPool, control: ControlChannels, upstream: Upstream
    ) -> None:
        self._instances = instances
        self._control = control
        self._upstream = upstream
        control.on_load = self.take

    def take(self, name: str, report: LoadReport) -> None:
        """Take in what an instance reports."""
        if (instance := self._instances.get(name)) is not None:
            instance.take_report(report)

    async def ask(self, instance: Instance) -> None:
        """Ask an instance for reports, until this is cancelled."""
        if not instance.control:
            await self._ask_by_http(instance)
        while True:
            await instance.wait_up()
            self._control.want_load(instance.name)
            await asyncio.sleep(WANT_EVERY_S)

    async def _ask_by_http(self, instance: Instance) -> None:
        """Ask an encode instance again and again; each answer comes when there is news."""
        known: dict[str, int] = {}
        while True:
            await instance.wait_up()
            load = None
            with contextlib.suppress(UpstreamError, msgspec.MsgspecError):
                # Its health is for probes.
                status, _, body = await self._upstream.ask(
                    "GET",
                    f"{instance.url}{LOAD_PATH}?{urlencode(known)}",
                    timeout_s=TIMEOUT_S,
                )
                if status == 200:
                    load = msgspec.json.decode(body, type=LoadReport)
            if load is None:
                # What comes back may be another process, which reports.
                with anyio.move_on_after(PAUSE_S):
                    await instance.wait_down()
                continue
            self.take(instance.name, load)
            known = {"items": load.items or 0, "pixels": load.pixels or 0}
            await asyncio.sleep(LOAD_EVERY_S)
