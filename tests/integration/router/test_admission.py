"""Who is let in to the instances, who waits, in which order, and who is refused."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response

from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import DEADLINE_S, Received, answer, forever, streamed
from tests.integration.router.test_access import KEY, OTHER_KEY, bearer, keys_file
from tests.integration.router.test_requests import BLUE, RED, TEXT

WAITING = 'epd_router_admission_waiting{priority="normal"}'
_WAITING = re.compile(r"^epd_router_admission_waiting\{.*\} (\S+)$", re.MULTILINE)


class OneByOne:
    """A PD instance's behaviour: each request is answered with its name when a test says so."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._answers: list[asyncio.Event] = []
        self._came = asyncio.Condition()

    async def __call__(self, received: Received) -> Response:
        may_answer = asyncio.Event()
        async with self._came:
            self.names.append(received.headers["x-request-id"])
            self._answers.append(may_answer)
            self._came.notify_all()
        await may_answer.wait()
        return JSONResponse({"name": received.headers["x-request-id"]})

    async def until(self, count: int) -> None:
        async with self._came:
            await asyncio.wait_for(
                self._came.wait_for(lambda: len(self.names) >= count), DEADLINE_S
            )

    async def answer_all(self, count: int) -> list[str]:
        """Answer requests as they come, each after the one before; return their names in order."""
        for number in range(count):
            await self.until(number + 1)
            self._answers[number].set()
        return self.names

    def answer(self, number: int) -> None:
        self._answers[number].set()


def ask(t: Topology, name: str, *parts: Any, **headers: str) -> asyncio.Task[httpx.Response]:
    given = {"x-request-id": name, **{key.replace("_", "-"): headers[key] for key in headers}}
    return asyncio.create_task(t.chat(*(parts or (TEXT,)), headers=given))


async def waiting(t: Topology, count: int) -> None:
    """Return when so many requests wait."""

    async with asyncio.timeout(DEADLINE_S):
        while sum(map(float, _WAITING.findall((await t.client.get("/metrics")).text))) != count:
            await asyncio.sleep(0.005)


async def line_up(t: Topology, *asked: dict[str, str]) -> list[asyncio.Task[httpx.Response]]:
    """Let requests wait, one after the other."""
    tasks = []
    for number, headers in enumerate(asked):
        tasks.append(ask(t, **headers))
        await waiting(t, number + 1)
    return tasks


async def test_beyond_the_queue_is_429_with_retry_after_and_the_key(build: Build) -> None:
    one_by_one = OneByOne()
    t = await build(behaviour=one_by_one, admission={"max_requests": 1, "max_waiting": 1})
    first = ask(t, "first")
    await one_by_one.until(1)
    (second,) = await line_up(t, {"name": "second"})

    refused = await ask(t, "third")

    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "router_busy")
    for word in ("router.admission.max_requests of 1", "router.admission.max_waiting"):
        assert word in error["message"]
    assert await t.metric(WAITING) == 1
    limit = 'limit="router.admission.max_requests"'
    line = f'epd_router_admission_refused_total{{{limit},reason="full"}}'
    assert await t.metric(line) == 1
    assert await one_by_one.answer_all(2) == ["first", "second"]
    assert [(await task).json()["name"] for task in (first, second)] == ["first", "second"]
    count = 'epd_router_admission_wait_seconds_count{priority="normal"}'
    assert (await t.metric(count), await t.metric(WAITING)) == (2, 0)


async def test_priority_overtakes_by_header_and_by_field(build: Build) -> None:
    one_by_one = OneByOne()
    t = await build(behaviour=one_by_one, admission={"max_requests": 1})
    ask(t, "first")
    await one_by_one.until(1)
    asked = await line_up(
        t,
        {"name": "last", "x_vllm_priority": "7"},
        {"name": "normal"},
        {"name": "unread", "x_vllm_priority": "high"},
        {"name": "header", "x_vllm_priority": "-2"},
    )
    by_field = t.chat(TEXT, headers={"x-request-id": "field"}, priority=-3)
    asked.append(asyncio.create_task(by_field))
    await waiting(t, 5)
    expected = ["first", "field", "header", "normal", "unread", "last"]
    assert await one_by_one.answer_all(6) == expected
    assert [(await each).status_code for each in asked] == [200] * 5


async def test_priority_may_be_none_of_the_clients_business(build: Build) -> None:
    one_by_one = OneByOne()
    t = await build(behaviour=one_by_one, admission={"max_requests": 1, "heed_priority": False})
    ask(t, "first")
    await one_by_one.until(1)
    await line_up(t, {"name": "second"}, {"name": "urgent", "x_vllm_priority": "-1"})
    assert await one_by_one.answer_all(3) == ["first", "second", "urgent"]


async def test_two_keys_share_however_many_requests_one_of_them_has(
    build: Build, tmp_path: Path
) -> None:
    one_by_one = OneByOne()
    t = await build(
        behaviour=one_by_one,
        admission={"max_requests": 1},
        api_keys_file=keys_file(tmp_path, KEY, OTHER_KEY),
    )
    ask(t, "first", **bearer(KEY))
    await one_by_one.until(1)
    many = [{"name": f"many-{n}", **bearer(KEY)} for n in range(6)]
    few = [{"name": f"few-{n}", **bearer(OTHER_KEY)} for n in range(2)]
    await line_up(t, *many, *few)
    went = await one_by_one.answer_all(9)
    assert went[1:5] == ["many-0", "few-0", "many-1", "few-1"]


LONG = {"type": "text", "text": "a" * 100_000}


@pytest.mark.parametrize(
    ("limits", "parts"),
    [
        ({"max_requests": 1}, (TEXT,)),
        ({"max_items": 3}, (RED, BLUE)),
        ({"max_bytes": 150_000}, (LONG,)),
        ({"encode": {"max_items": 3}}, (RED, BLUE)),
        ({"answer": {"max_requests": 1}}, (TEXT,)),
        # Larger than the whole limit: alone.
        ({"max_items": 1}, (RED, BLUE)),
    ],
)
async def test_each_limit_holds(
    build: Build, limits: dict[str, Any], parts: tuple[dict[str, Any], ...]
) -> None:
    one_by_one = OneByOne()
    t = await build(behaviour=one_by_one, encoding=forever, admission=limits)
    first = ask(t, "first", *parts)
    await one_by_one.until(1)
    second = ask(t, "second", *parts)
    await waiting(t, 1)
    assert one_by_one.names == ["first"]
    one_by_one.answer(0)
    assert (await first).status_code == 200
    await one_by_one.until(2)
    one_by_one.answer(1)
    assert (await second).status_code == 200


async def test_an_encoder_has_room_again_when_an_item_is_encoded(build: Build) -> None:
    """Not only when it is answered."""
    one_by_one = OneByOne()
    t = await build(behaviour=one_by_one, admission={"encode": {"max_items": 1}})
    ask(t, "first", RED)
    ask(t, "second", BLUE)
    await one_by_one.until(2)
    assert len(t.encoders[0].received) == 2


async def test_items_wait_for_no_encoder_where_there_is_none(build: Build) -> None:
    t = await build(admission={"encode": {"max_items": 1}})
    await t.encoders[0].serving.stop()
    await t.until_health(lambda states: states["encode-0"]["state"] == "down")
    answers = await asyncio.gather(ask(t, "a", RED), ask(t, "b", BLUE))
    assert [each.status_code for each in answers] == [200, 200]


async def test_a_client_that_leaves_its_answer_lets_the_next_one_in(build: Build) -> None:
    begun = streamed(b"data: {}\n\n", asyncio.Event())
    t = await build(behaviour=begun, admission={"max_requests": 1})
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with t.client.stream("POST", "/v1/chat/completions", json=body) as response:
        pieces_of_it = response.aiter_bytes()
        assert await anext(pieces_of_it)
        second = ask(t, "second")
        await waiting(t, 1)
        t.pd.behaviour = answer
    assert (await second).status_code == 200


async def test_those_that_wait_are_answered_when_the_router_stops(build: Build) -> None:
    one_by_one = OneByOne()
    t = await build(behaviour=one_by_one, admission={"max_requests": 1})
    first = ask(t, "first")
    await one_by_one.until(1)
    (second,) = await line_up(t, {"name": "second"})
    draining = asyncio.create_task(t.router.router.drain())  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    late = await ask(t, "late")
    assert (late.status_code, late.json()["error"]["code"]) == (503, "service_unavailable")
    assert await one_by_one.answer_all(2) == ["first", "second"]
    assert [(await each).status_code for each in (first, second)] == [200, 200]
    await draining


async def test_nobody_waits_for_what_no_instance_computes(build: Build) -> None:
    t = await build(behaviour=forever, admission={"max_requests": 1})
    ask(t, "first")
    await t.pd.until(lambda pd: len(pd.received) == 1)
    assert (await t.client.get("/v1/models")).status_code == 200
