"""Fallbacks, clients that go away, and instances that do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import pytest
from starlette.responses import JSONResponse, Response

from epd_portable.placement.instances import PROBES_UNTIL_DOWN
from epd_portable.wire import codec
from epd_portable.wire.messages import Abort, EncodeFailed, NackCode
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import (
    Behaviour,
    Received,
    RouterServing,
    answer,
    dying,
    forever,
    full,
    in_turn,
    refuse,
    refusing,
    stream,
    streamed,
    until,
)
from tests.integration.router.test_requests import BLUE, RED, TEXT

Settings: TypeAlias = dict[str, Any]


def until_told_to_encode(t: Topology) -> Behaviour:
    """A PD instance that answers as soon as the router tells it to encode by itself."""

    async def behave(received: Received) -> Response:
        transfer_id = received.params["transfers"][0]["transfer_id"]
        message = await t.control.receive_of(transfer_id)
        assert isinstance(message, EncodeFailed)
        return JSONResponse({"reason": message.reason})

    return behave


async def test_a_client_that_leaves_a_stream_ends_it_at_the_instance(build: Build) -> None:
    t = await build()

    async def pieces() -> AsyncIterator[bytes]:
        try:
            yield b"data: {}\n\n"
            await asyncio.Event().wait()
        finally:
            await t.pd.count_abort()

    t.pd.behaviour = stream(pieces)
    body = {"prompt": "x", "stream": True}
    async with t.client.stream("POST", "/v1/completions", json=body) as response:
        assert await anext(response.aiter_bytes())
    await t.pd.until(lambda pd: pd.aborted == 1)


SOON, BRIEF = {"encode_timeout_s": 1.0}, {"wait_timeout_s": 0.5}
AMPLE = {"wait_timeout_s": 3.0}
"""Leaves a second try, which begins after half of it, more than a second on a busy machine."""
FULL = "encoders full: encode-0; last: answered 429"
ITEM_FAILURES: dict[str, tuple[int, Settings, list[Behaviour], int, str, str]] = {
    "another one after a 500": (2, {}, [refuse(500), answer], 2, "error", "retried"),
    "none after two": (3, {}, [refuse(503)], 2, "error", "encoders tried: "),
    "none for a picture at fault": (2, {}, [refuse(400)], 1, "refused", "encoders tried: "),
    "another one in time": (2, SOON, [forever, answer], 2, "timeout", "retried"),
    "none after its time": (1, SOON, [forever], 1, "timeout", "no answer within"),
    "another one at once if full": (2, {}, [full(20_000), answer], 2, "full", "retried"),
    "all are full for a while": (2, {}, [*[full(60)] * 6, answer], 7, "full", "encoded"),
    "full without a time": (1, {}, [refuse(429), answer], 2, "full", "encoded"),
    "full for long": (1, BRIEF, [full(60_000)], 1, "full", FULL),
    "full until the deadline": (1, AMPLE, [full(1_800), forever], 2, "full", FULL),
}


@pytest.mark.parametrize("case", ITEM_FAILURES)
async def test_an_item_that_an_encoder_does_not_encode_is_retried_or_encoded_locally(
    build: Build, case: str
) -> None:
    encoders, settings, jobs, count, failure, result = ITEM_FAILURES[case]
    t = await build(encoders=encoders, **settings)
    asked = in_turn(t.encoders, *jobs)
    brought = result in ("encoded", "retried")

    async def until_encoded(received: Received) -> Response:
        await t.until_metric(f'epd_router_encode_jobs_total{{end="{failure}"}}', 1)
        await until(lambda: len(asked) >= count)
        return JSONResponse({"reason": ""})

    t.pd.behaviour = until_encoded if brought else until_told_to_encode(t)
    response = await t.chat(RED)

    assert response.status_code == 200
    assert brought or result in response.json()["reason"]
    assert len(asked) == count
    assert len({job.params["transfers"][0]["transfer_id"] for job in asked}) == 1
    outcome = result if brought else "local"
    await t.until_metric(f'epd_router_items_total{{outcome="{outcome}"}}', 1)
    steps = f'epd_router_fallbacks_total{{phase="encode",failure="{failure}",fallback='
    assert await t.metric(steps + '"local"}') == (not brought)
    assert await t.metric(steps + '"retried"}') == len(asked) - 1
    # Who is full, or refuses a picture, is well; so is who had the time that others left.
    assert isinstance(t.router, RouterServing)
    known = t.router.router.instances.of_duty("encode")
    assert all(each.healthy for each in known)
    assert failure not in ("full", "refused") or not any(e.breaker.failures for e in known)


@pytest.mark.parametrize("in_pieces", [False, True])
async def test_nobody_waits_for_a_full_encoder_once_the_answer_has_begun(
    build: Build, in_pieces: bool
) -> None:
    t = await build()
    t.encoders[0].behaviour = full(20_000)
    ended = asyncio.Event()
    begins = streamed(b"data: 1\n\n", ended)

    async def generate(received: Received) -> Response:
        await t.encoders[0].until(lambda encoder: len(encoder.received) == 1)
        return await (begins if in_pieces else answer)(received)

    t.pd.behaviour = generate
    chat = asyncio.create_task(t.chat(RED, stream=in_pieces))
    await t.until_metric('epd_router_items_total{outcome="not_needed"}', 1)
    ended.set()
    assert (await chat).status_code == 200
    assert len(t.encoders[0].received) == 1


async def test_an_encoder_that_dies_within_a_job_is_noticed_at_once(build: Build) -> None:
    t = await build(probe_interval_s=60)
    t.encoders[0].behaviour = forever
    t.pd.behaviour = until_told_to_encode(t)

    chat = asyncio.create_task(t.chat(RED))
    await t.encoders[0].until(lambda encoder: len(encoder.received) == 1)
    await t.encoders[0].serving.stop()

    assert (await chat).status_code == 200
    await t.until_health(lambda instances: not instances["encode-0"]["healthy"])


async def test_an_encoder_that_dies_after_its_job_may_not_have_written(build: Build) -> None:
    t = await build()
    t.pd.behaviour = until_told_to_encode(t)

    chat = asyncio.create_task(t.chat(RED))
    await t.until_metric('epd_router_encode_job_seconds_count{instance="encode-0"}', 1)
    await t.encoders[0].serving.stop()

    assert "went down" in (await chat).json()["reason"]


async def test_an_answer_that_comes_keeps_its_instance_from_counting_as_gone(build: Build) -> None:
    t = await build(encoders=0, pds=2)
    probes = {pd.name: 0 for pd in t.pds}

    def failing(name: str) -> Callable[[], Awaitable[Response]]:
        async def health() -> Response:
            probes[name] += 1
            return Response(status_code=503)

        return health

    def pieces_of(name: str) -> Callable[[], AsyncIterator[bytes]]:
        async def pieces() -> AsyncIterator[bytes]:
            first = probes[name]
            while probes[name] < first + 4 * PROBES_UNTIL_DOWN:
                yield b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
                await asyncio.sleep(0.01)
            yield b"data: [DONE]\n\n"

        return pieces

    for pd in t.pds:
        pd.behaviour = stream(pieces_of(pd.name))
        pd.health = failing(pd.name)
    response = await t.chat(TEXT, stream=True)
    assert response.text.endswith("data: [DONE]\n\n")
    # And then nothing comes any more.
    await t.until_health(lambda instances: not any(each["healthy"] for each in instances.values()))


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [(NackCode.TOO_LARGE, 413, False), (NackCode.UNAVAILABLE, 503, True)],
)
@pytest.mark.parametrize("form", ["plain", "streamed"])
async def test_a_failed_request_is_answered_with_the_reason_from_the_control_channel(
    build: Build, code: NackCode, status: int, retry: bool, form: str
) -> None:
    t = await build(nack_grace_s=20)

    async def generate(received: Received) -> Response:
        asyncio.get_running_loop().call_later(0.1, refuse_soon, received)
        error = {"error": {"message": "engine error", "code": 500}}
        if form == "plain":
            return JSONResponse(error, status_code=500)
        return Response(f"data: {json.dumps(error)}\n\n", media_type="text/event-stream")

    refusals: list[asyncio.Task[None]] = []

    def refuse_soon(received: Received) -> None:
        refusal = t.control.refuse(received.params, code, "value, limit and remedy")
        refusals.append(asyncio.create_task(refusal))

    t.pd.behaviour = generate

    response = await t.chat(RED, stream=form == "streamed")

    assert response.status_code == status
    assert response.json()["error"]["message"] == "value, limit and remedy"
    assert ("retry-after" in response.headers) is retry


async def test_without_another_encoder_a_refusal_leads_to_local_encoding(build: Build) -> None:
    t = await build()
    told = until_told_to_encode(t)
    t.pd.behaviour = refusing(t.control, NackCode.NO_COMMON_PATH, "no path from there", told)
    response = await t.chat(RED)
    assert "refused: 'no path from there'" in response.json()["reason"]
    assert await t.metric('epd_router_fallbacks_total{phase="encode",fallback="local"}') == 1


@pytest.mark.parametrize("code", [NackCode.INCOMPATIBLE, NackCode.NO_COMMON_PATH])
async def test_other_refusals_do_not_hide_the_instances_own_error(
    build: Build, code: NackCode
) -> None:
    t = await build()
    failing = refuse(500, "engine error")
    t.pd.behaviour = refusing(t.control, code, "encodes by itself", failing)
    response = await t.chat(RED)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "engine error"


async def test_a_request_is_not_sent_to_every_pd_instance_in_turn(build: Build) -> None:
    t = await build(pds=3)
    asked = in_turn(t.pds, dying(*t.pds))
    assert (await t.chat(TEXT)).status_code == 503
    assert len(asked) == 2


async def test_without_a_pd_instance_clients_are_told_to_come_again(build: Build) -> None:
    t = await build()
    await t.pd.serving.stop()

    at_once = await t.chat(RED)
    await t.until_health(lambda instances: not instances["pd-0"]["healthy"])
    later = await t.chat(RED)

    for response in (at_once, later):
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert "pd-0" in response.json()["error"]["message"]
    assert (await t.client.get("/health")).status_code == 503
    assert (await t.client.get("/v1/models")).status_code == 503


async def test_a_silent_pd_instance_does_not_hang_the_client(build: Build) -> None:
    t = await build(wait_timeout_s=0.1, idle_timeout_s=0.2)
    t.pd.behaviour = forever
    response = await t.chat(RED)
    assert response.status_code == 504
    await t.pd.until(lambda pd: pd.aborted == 1)


@pytest.mark.parametrize("nbytes", [5, 2 * codec.MAX_MESSAGE_BYTES])
async def test_noise_on_the_control_channel_is_survived(build: Build, nbytes: int) -> None:
    t = await build()

    async def generate(received: Received) -> Response:
        await t.control.send(received.params["reply_to"], bytes(nbytes))
        # Who sends more than is allowed loses its connection, perhaps with what it says next.
        if nbytes < codec.MAX_MESSAGE_BYTES:
            await t.control.refuse(received.params, NackCode.TOO_LARGE, "far too large")
        return Response(status_code=500)

    t.pd.behaviour = generate
    expected = 413 if nbytes < codec.MAX_MESSAGE_BYTES else 500
    assert (await t.chat(RED)).status_code == expected


FORGED = "no\n12:00:00 I router: all is well \x1b[2K"


async def refuse_in_plain_text(received: Received) -> Response:
    return Response(FORGED, status_code=500)


async def test_what_peers_say_stays_within_its_line_of_the_log(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    t = await build(encoders=2)
    told = until_told_to_encode(t)

    async def generate(received: Received) -> Response:
        await t.control.refuse(received.params, NackCode.NO_COMMON_PATH, FORGED)
        nonsense = codec.encode(Abort(transfer_id=FORGED, reason=FORGED), session="s")
        await t.control.send(received.params["reply_to"], nonsense)
        return await told(received)

    t.pd.behaviour = generate
    for encoder in t.encoders:
        encoder.behaviour = refuse_in_plain_text
    assert (await t.chat(RED, BLUE)).status_code == 200
    lines = [record.getMessage() for record in caplog.records]
    assert sum("all is well" in line for line in lines) >= 3
    assert all(line.isprintable() for line in lines if "all is well" in line)
