from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from epd_portable.config.roles import PAIR_LABEL
from epd_portable.config.secret import Secret
from epd_portable.connector.curve import read_keys
from epd_portable.router.server import Router
from epd_portable.router.settings import RouterSettings
from tests.integration.router.stand_in import (
    DEADLINE_S,
    Behaviour,
    ControlEnd,
    Received,
    RouterServing,
    Serving,
    StandIn,
    answer,
)
from tests.keyring import Signed, secret_file
from tests.metrics_page import total


@dataclass
class Topology:
    """A router between stand-ins, and a client of it."""

    encoders: list[StandIn]
    pds: list[StandIn]
    controls: list[ControlEnd]
    client: httpx.AsyncClient
    router: Serving
    settings: RouterSettings

    async def stop(self) -> None:
        """End the router, which would otherwise connect to instances that are just ending."""
        await self.client.aclose()
        await self.router.stop()

    async def start_router_again(self) -> None:
        """Start another router in the place of the one that was stopped."""
        after = RouterServing(Router(self.settings))
        after.port = self.router.port
        await after.start()
        self.router = after

    @property
    def pd(self) -> StandIn:
        return self.pds[0]

    @property
    def control(self) -> ControlEnd:
        return self.controls[0]

    def control_of(self, received: Received) -> ControlEnd:
        """Return the control channel of the instance that got a request."""
        pairs = zip(self.pds, self.controls, strict=True)
        return next(end for pd, end in pairs if any(each is received for each in pd.received))

    async def chat(
        self, *parts: Any, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": list(parts)}], **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def metric(self, line: str) -> float:
        """Return the sum of a metric's series, named with some of their labels."""
        text = (await self.client.get("/metrics")).text
        return total(text, line)

    async def until_metric(self, line: str, value: float) -> None:
        """Wait until a metric has reached a value."""

        async with asyncio.timeout(DEADLINE_S):
            while await self.metric(line) < value:
                await asyncio.sleep(0.02)

    async def health(self) -> httpx.Response:
        """Return the router's view of its instances, as holders of the secret see it."""
        signed = Signed(Secret.read(self.settings.secret_file))
        return await self.client.get("/health", auth=signed)

    async def until_health(self, condition: Callable[[dict[str, Any]], bool]) -> httpx.Response:
        """Wait until the router's view of its instances fulfils a condition."""

        async def fulfilled() -> httpx.Response:
            while True:
                response = await self.health()
                if condition(response.json()["instances"]):
                    return response
                await asyncio.sleep(0.02)

        return await asyncio.wait_for(fulfilled(), DEADLINE_S)


Build = Callable[..., Awaitable[Topology]]
Front = Callable[[RouterSettings], Serving]


@pytest.fixture
def front() -> Front:
    """Return what serves clients by some settings."""
    return lambda settings: RouterServing(Router(settings))


async def stop_all(instances: Sequence[StandIn]) -> None:
    await asyncio.gather(*(instance.serving.stop() for instance in instances))


@pytest.fixture
async def build(front: Front) -> AsyncIterator[Build]:
    stack = AsyncExitStack()

    async def make(
        encoders: int = 1,
        pds: int | Sequence[str] = 1,
        behaviour: Behaviour = answer,
        encoding: Behaviour = answer,
        in_zones: Sequence[str] = (),
        paired: bool = False,
        **settings: Any,
    ) -> Topology:
        e = [StandIn(f"encode-{n}", "encode", encoding) for n in range(encoders)]
        roles = ["prefill-decode"] * pds if isinstance(pds, int) else pds
        pd = [StandIn(f"pd-{n}", role, behaviour) for n, role in enumerate(roles)]
        # What has started ends, also where the rest cannot start.
        stack.push_async_callback(stop_all, e + pd)
        await asyncio.gather(*(instance.serving.start() for instance in e + pd))
        settings = {"secret_file": secret_file(), "registration": False, **settings}
        controls = [ControlEnd(read_keys(settings["secret_file"])) for _ in pd]
        for control in controls:
            stack.callback(control.close)
        addresses = [""] * encoders + [control.address for control in controls]
        instances: list[dict[str, Any]] = [
            {"name": i.name, "role": i.role, "url": i.serving.url, "control": address}
            for i, address in zip(e + pd, addresses, strict=True)
        ]
        for instance, zone in zip(instances[encoders:], in_zones, strict=False):
            instance["labels"] = {"zone": zone}
        if paired:
            instances[encoders]["labels"] = {PAIR_LABEL: e[0].name}
        options = {
            "port": 0,
            "model": "demo",
            "instances": instances,
            "probe_interval_s": 0.1,
            # Everybody shares one event loop, beside other tests.
            "connect_timeout_s": 20.0,
            "nack_grace_s": 0.3,
            "item_outcomes": True,
            # Media of the tests are a few bytes that stand for some.
            # Who encodes an item must not depend on how long others took.
            "elastic_encode": False,
            **settings,
        }
        router_settings = RouterSettings.model_validate(options)
        client = httpx.AsyncClient(timeout=DEADLINE_S)
        topology = Topology(e, pd, controls, client, front(router_settings), router_settings)
        stack.push_async_callback(topology.stop)
        await topology.router.start()
        client.base_url = topology.router.url
        return topology

    async with stack:
        yield make
