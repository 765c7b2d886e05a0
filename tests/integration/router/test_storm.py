"""Everything at once, by the dice: instances answer, fail, hang, cut, refuse and die; clients go.

Whatever happens, each client gets its own answer or an error that says so, and nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anyio
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from epd_portable.router.server import Router
from epd_portable.wire.messages import NackCode
from tests.integration.router.conftest import Build
from tests.integration.router.stand_in import (
    ControlEnd,
    Received,
    StandIn,
    answer,
    at_once,
    forever,
    full,
    refuse,
    until,
)
from tests.integration.router.test_faults import inside
from tests.integration.router.test_requests import BLUE, RED

REQUESTS = 600
LEAVING = 60
EVENTS = 8
IDLE_S = 3.0
DEADLINE_S = 30.0
CLEAR = {
    (400, "item_refused"),
    (400, 400),
    (413, "item_too_large"),
    (500, 500),
    (502, "instance_lost"),
    (503, "service_unavailable"),
    (504, "timeout"),
}
"""Errors that a client may get: status and code; numbers are instances' own."""


@dataclass
class Wild:
    """How an instance behaves that throws dice for each request, the same ones in every run."""

    seed: int
    instance: StandIn
    control: ControlEnd | None = None
    thrown: Counter[str] = field(default_factory=Counter)
    calm: bool = False

    async def __call__(self, received: Received) -> Response:
        name = received.headers["x-request-id"]
        self.thrown[name] += 1
        dice = random.Random(f"{self.seed} {self.instance.name} {name} {self.thrown[name]}")
        await asyncio.sleep(dice.choice([0, 0, 0.02, 0.3, 1.0]))
        faces = ["well", "cut", "hang", "fail", "refuse", "full", "nack"]
        what = "well" if self.calm else dice.choices(faces, [80, 4, 2, 4, 3, 6, 2])[0]
        if what == "cut":
            self.instance.serving.drop_connections(received)
            return Response()
        if what == "hang":
            return await forever(received)
        if what == "fail" or (what == "nack" and not received.params):
            return await refuse(500)(received)
        if what == "refuse":
            return await refuse(400)(received)
        if self.control is None:
            return await (full(100) if what == "full" else answer)(received)
        if what == "nack":
            code = dice.choice([NackCode.TOO_LARGE, NackCode.UNAVAILABLE, NackCode.INCOMPATIBLE])
            await self.control.refuse(received.params, code, "by the dice")
            return await refuse(500)(received)
        if not received.body.get("stream"):
            return JSONResponse({"id": name, "choices": ["a" * dice.choice([1, 200_000])]})
        cut_after = None if self.calm else dice.choice([None, None, None, None, 0, 3])
        events = self._events(name, dice, received, cut_after)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(
        self, name: str, dice: random.Random, received: Received, cut_after: int | None
    ) -> AsyncIterator[bytes]:
        for number in range(EVENTS):
            event = b'data: {"id": "%b", "n": %d}\n\n' % (name.encode(), number)
            if number == cut_after:
                yield event[:10]
                await asyncio.sleep(0.05)
                self.instance.serving.drop_connections(received)
                return
            half = dice.randrange(len(event))
            yield event[:half]
            await asyncio.sleep(dice.choice([0, 0, 0.1]))
            yield event[half:]
        yield b"data: [DONE]\n\n"


async def kill_and_start_again(instance: StandIn) -> None:
    await instance.serving.stop()
    await asyncio.sleep(0.4)
    await instance.serving.start()


@dataclass
class Storm:
    """A router among such instances, and its clients."""

    seed: int
    url: str
    http: aiohttp.ClientSession
    turns: asyncio.Semaphore
    outcomes: Counter[str] = field(default_factory=Counter)

    async def client(self, number: int) -> None:
        async with self.turns:
            await self._client(number)

    async def _client(self, number: int) -> None:
        dice = random.Random(f"{self.seed} {number}")
        parts: list[Any] = dice.choice([["text"], [RED], [RED, BLUE]])
        content = [{"type": "text", "text": "hi"} if part == "text" else part for part in parts]
        stream = dice.random() < 0.5
        body = {"messages": [{"role": "user", "content": content}], "stream": stream}
        asked = self._ask(f"storm-{number}", body)
        if number % (REQUESTS // LEAVING):
            await asked
            return
        # To cancel it closes its connection.
        leaving = asyncio.create_task(asked)
        await asyncio.wait({leaving}, timeout=dice.uniform(0, 2))
        if leaving.done():
            leaving.result()
            return
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        self.outcomes["left"] += 1

    async def _ask(self, name: str, body: Any) -> None:
        headers = {"x-request-id": name}
        url = f"{self.url}/v1/chat/completions"
        async with self.http.post(url, json=body, headers=headers) as response:
            text = await response.text()
            assert response.headers["x-request-id"] == name
            assert response.headers["content-type"].startswith(
                "text/event-stream" if response.status == 200 and body["stream"] else "app"
            )
        if response.status != 200:
            error = json.loads(text)["error"]
            assert (response.status, error["code"]) in CLEAR, text
            self.outcomes[str(response.status)] += 1
        elif not body["stream"]:
            answer = json.loads(text)
            assert answer["id"] == name
            assert answer["choices"][0].strip("a") == ""
            self.outcomes["whole"] += 1
        else:
            self._check_events(name, text)

    def _check_events(self, name: str, text: str) -> None:
        *events, rest = text.split("\n\n")
        assert rest == "", text
        last = events.pop().removeprefix("data: ")
        read = [json.loads(event.removeprefix("data: ")) for event in events]
        assert read == [{"id": name, "n": number} for number in range(len(read))]
        if last == "[DONE]":
            assert len(read) == EVENTS
            self.outcomes["stream"] += 1
        else:
            assert json.loads(last)["error"]["code"] == "instance_lost"
            self.outcomes["broken stream"] += 1


async def read_all(control: ControlEnd) -> None:
    while True:
        await control._socket.recv_multipart()


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Fail here, and not in another test, for what a storm left in its event loop."""
    yield
    gc.collect()


@pytest.mark.parametrize(("media", "seed"), [("concurrent", 1), ("metadata", 2)])
async def test_nothing_is_left_of_a_storm(build: Build, seed: int, media: str) -> None:
    t = await build(
        encoders=2,
        pds=2,
        media=media,
        elastic_encode=True,
        item_outcomes=False,
        connect_timeout_s=2.0,
        probe_interval_s=0.2,
        nack_grace_s=0.1,
        wait_timeout_s=2.0,
        idle_timeout_s=IDLE_S,
    )
    dice = [Wild(seed, each) for each in t.encoders]
    dice += [Wild(seed, *each) for each in zip(t.pds, t.controls, strict=True)]
    for each in dice:
        each.instance.behaviour = each
    router = inside(t)
    async with contextlib.AsyncExitStack() as stack:
        for control in t.controls:
            reader = asyncio.create_task(read_all(control))
            stack.callback(reader.cancel)
        await t.until_health(lambda seen: all(each["state"] == "up" for each in seen.values()))
        before = asyncio.all_tasks()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            storm = Storm(seed, t.router.url, http, asyncio.Semaphore(at_once(REQUESTS)))
            clients = asyncio.gather(*(storm.client(number) for number in range(REQUESTS)))
            await asyncio.sleep(1.0)
            await asyncio.gather(*map(kill_and_start_again, t.encoders))
            await asyncio.gather(*map(kill_and_start_again, t.pds))
            await clients
            for each in dice:
                each.calm = True
            await until(lambda: all(each.preferred for each in router.instances.all))
            after = Storm(seed, t.router.url, http, asyncio.Semaphore(at_once(REQUESTS)))
            await asyncio.gather(*(after.client(number) for number in range(1, 10)))
            assert after.outcomes["whole"] + after.outcomes["stream"] == 9, after.outcomes

        assert sum(storm.outcomes.values()) == REQUESTS
        # Jobs of answered requests may still be answered for a while.
        await until(lambda: is_quiet(router))
        # Probes and connections that end have tasks too, but others after a while.
        left = {task for task in asyncio.all_tasks() - before if not is_server(task)}
        with anyio.move_on_after(DEADLINE_S):
            while left:
                await asyncio.sleep(0.1)
                left &= asyncio.all_tasks()
        assert not left


def is_server(task: asyncio.Task[Any]) -> bool:
    """Tell whether a task is that of an instance, which was started again."""
    return getattr(task.get_coro(), "__qualname__", "") in ("Server.serve", "LifespanOn.main")


def is_quiet(router: Router) -> bool:
    """Tell whether nothing is counted any more."""
    return (
        not (router.in_flight or router.exchange._tasks)
        and all(each.idle and not each.load and not each._uses for each in router.instances.all)
        and all(not tier.load for tiers in router.instances._tiers.values() for tier in tiers)
        and not router.held_bytes.count
        and not router._control._inboxes
        and all(each._answer is None for each in router.upstream._connections)
        and router.metrics.in_flight._value.get() == 0
    )
