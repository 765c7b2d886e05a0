"""Fallbacks, clients that go away, and instances that do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from starlette.responses import JSONResponse, Response

from epd_portable.delivery.fallbacks import RETRIES_AT_ONCE
from epd_portable.delivery.instances import PROBES_UNTIL_DOWN
from epd_portable.wire import codec
from epd_portable.wire.messages import Abort, EncodeFailed, NackCode
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import (
    Behaviour,
    Received,
    StandIn,
    answer,
    refuse,
    stream,
)
from tests.integration.router.test_requests import BLUE, RED, TEXT, image


async def forever(received: Received) -> Response:
    await asyncio.Event().wait()
    raise AssertionError


def until_told_to_encode(t: Topology) -> Behaviour:
    """A PD instance that answers as soon as the router tells it to encode by itself."""

    async def behave(received: Received) -> Response:
        transfer_id = received.params["transfers"][0]["transfer_id"]
        message = await t.control.receive_of(transfer_id)
        assert isinstance(message, EncodeFailed)
        return JSONResponse({"reason": message.reason})

    return behave


async def test_another_encoder_is_tried_for_the_same_transfer(build: Build) -> None:
    t = await build(encoders=2)
    done = asyncio.Event()

    async def encode(received: Received) -> Response:
        # The first one to be asked fails, whichever it is.
        if len(t.encoders[0].received) + len(t.encoders[1].received) == 1:
            return Response(status_code=500)
        done.set()
        return JSONResponse({})

    async def generate(received: Received) -> Response:
        await done.wait()
        return JSONResponse({})

    for encoder in t.encoders:
        encoder.behaviour = encode
    t.pd.behaviour = generate

    assert (await t.chat(RED)).status_code == 200
    first, second = (encoder.received[0].params for encoder in t.encoders)
    assert first == second
    await t.until_metric('epd_router_items_total{outcome="retried"}', 1)
    assert await t.metric('epd_router_fallbacks_total{phase="encode",fallback="retried"}') == 1


@pytest.mark.parametrize("status", [500, 503, 400])
async def test_without_another_encoder_the_pd_instance_is_told_to_encode(
    build: Build, status: int
) -> None:
    t = await build()
    t.encoders[0].behaviour = refuse(status)
    t.pd.behaviour = until_told_to_encode(t)

    response = await t.chat(RED)

    assert response.status_code == 200
    assert f"answered {status}" in response.json()["reason"]
    assert await t.metric('epd_router_fallbacks_total{phase="encode",fallback="local"}') == 1
    assert await t.metric('epd_router_items_total{outcome="local"}') == 1


def full(*, for_ms: int) -> Behaviour:
    """An encoder that is full, and says for how long."""

    async def behave(received: Received) -> Response:
        return JSONResponse({}, status_code=429, headers={"retry-after-ms": str(for_ms)})

    return behave


async def test_while_one_encoder_is_full_another_is_asked_at_once(build: Build) -> None:
    t = await build(encoders=2)
    asked: list[str] = []
    done = asyncio.Event()

    def behaviour(name: str) -> Behaviour:
        async def behave(received: Received) -> Response:
            asked.append(name)
            if len(asked) == 1:
                return await full(for_ms=20_000)(received)
            done.set()
            return JSONResponse({})

        return behave

    async def generate(received: Received) -> Response:
        await done.wait()
        return JSONResponse({})

    for encoder in t.encoders:
        encoder.behaviour = behaviour(encoder.name)
    t.pd.behaviour = generate

    assert (await t.chat(RED)).status_code == 200
    assert sorted(asked) == ["encode-0", "encode-1"]
    await t.until_metric('epd_router_items_total{outcome="retried"}', 1)
    assert await t.metric('epd_router_fallbacks_total{failure="full",fallback="retried"}') == 1
    assert await t.metric('epd_router_fallbacks_total{phase="encode",fallback="retried"}') == 1


async def test_when_all_encoders_are_full_one_is_asked_again_when_it_has_room(
    build: Build,
) -> None:
    t = await build(encoders=2)
    done = asyncio.Event()

    async def encode(received: Received) -> Response:
        if sum(len(encoder.received) for encoder in t.encoders) <= 6:
            return await full(for_ms=60)(received)
        done.set()
        return JSONResponse({})

    async def generate(received: Received) -> Response:
        await done.wait()
        return JSONResponse({})

    for encoder in t.encoders:
        encoder.behaviour = encode
    t.pd.behaviour = generate

    assert (await t.chat(RED)).status_code == 200
    assert [len(encoder.received) for encoder in t.encoders].count(3) == 1
    await t.until_metric('epd_router_fallbacks_total{failure="full",fallback="retried"}', 6)
    assert await t.metric('epd_router_fallbacks_total{phase="encode",fallback="local"}') == 0
    health = await t.until_health(lambda _: True)
    assert all(state["healthy"] for state in health.json()["instances"].values())


@pytest.mark.parametrize("for_ms", [100, 60_000])
async def test_an_encoder_that_stays_full_costs_no_more_than_the_longest_wait(
    build: Build, for_ms: int
) -> None:
    t = await build(wait_timeout_s=0.5)
    t.encoders[0].behaviour = full(for_ms=for_ms)
    t.pd.behaviour = until_told_to_encode(t)

    response = await t.chat(RED)

    assert response.json()["reason"].startswith("encoders full: encode-0; last: answered 429")
    assert 1 <= len(t.encoders[0].received) <= 5
    assert await t.metric('epd_router_fallbacks_total{phase="encode",fallback="local"}') == 1


async def test_an_encoder_that_was_full_until_the_item_s_deadline_is_said_to_be_full(
    build: Build,
) -> None:
    t = await build(wait_timeout_s=0.5)

    async def encode(received: Received) -> Response:
        if len(t.encoders[0].received) == 1:
            return await full(for_ms=300)(received)
        await asyncio.Event().wait()
        raise AssertionError

    t.encoders[0].behaviour = encode
    t.pd.behaviour = until_told_to_encode(t)

    response = await t.chat(RED)

    assert response.json()["reason"].startswith("encoders full: encode-0; last: answered 429")
    assert len(t.encoders[0].received) <= 2


async def test_a_full_encoder_that_tells_no_time_is_asked_again(build: Build) -> None:
    t = await build()
    done = asyncio.Event()

    async def encode(received: Received) -> Response:
        if len(t.encoders[0].received) == 1:
            return await refuse(429)(received)
        done.set()
        return JSONResponse({})

    async def generate(received: Received) -> Response:
        await done.wait()
        return JSONResponse({})

    t.encoders[0].behaviour, t.pd.behaviour = encode, generate
    assert (await t.chat(RED)).status_code == 200
    await t.until_metric('epd_router_items_total{outcome="encoded"}', 1)


async def test_nobody_waits_for_a_full_encoder_once_the_answer_has_begun(build: Build) -> None:
    t = await build()
    t.encoders[0].behaviour = full(for_ms=5_000)

    async def generate(received: Received) -> Response:
        await t.encoders[0].until(lambda encoder: len(encoder.received) == 1)
        return JSONResponse({})

    t.pd.behaviour = generate
    assert (await t.chat(RED)).status_code == 200
    await t.until_metric('epd_router_items_total{outcome="not_needed"}', 1)
    assert len(t.encoders[0].received) == 1


async def test_a_picture_that_an_encoder_refuses_is_not_tried_elsewhere(build: Build) -> None:
    t = await build(encoders=2)
    for encoder in t.encoders:
        encoder.behaviour = refuse(400)
    t.pd.behaviour = until_told_to_encode(t)
    await t.chat(RED)
    assert sum(len(encoder.received) for encoder in t.encoders) == 1


async def test_after_two_failing_encoders_the_pd_instance_is_told_to_encode(build: Build) -> None:
    t = await build(encoders=3)
    for encoder in t.encoders:
        encoder.behaviour = refuse(500)
    t.pd.behaviour = until_told_to_encode(t)
    await t.chat(RED)
    assert sum(len(encoder.received) for encoder in t.encoders) == 2


async def test_an_encoder_that_takes_too_long_is_given_up(build: Build) -> None:
    t = await build(encode_timeout_s=0.2)
    t.encoders[0].behaviour = forever
    t.pd.behaviour = until_told_to_encode(t)

    response = await t.chat(RED)

    assert "no answer within" in response.json()["reason"]
    await t.encoders[0].until(lambda encoder: encoder.aborted == 1)


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


async def test_bad_pictures_leave_others_their_retries(build: Build) -> None:
    t = await build(encoders=2, pds=2, encoding=refuse(400, "cannot decode"))
    asked = 0

    async def wait_for_all(received: Received) -> Response:
        await t.until_metric('epd_router_items_total{outcome="local"}', asked)
        return JSONResponse({})

    for pd in t.pds:
        pd.behaviour = wait_for_all
    # More than the budget of retries.
    while asked < RETRIES_AT_ONCE + 20:
        asked += 60
        response = await t.chat(*(image(b"bad %d" % (asked + n)) for n in range(60)), TEXT)
        assert response.status_code == 200
    lost: list[Received] = []

    async def die_once(received: Received) -> Response:
        if not lost:
            lost.append(received)
            return Response(status_code=500)
        return JSONResponse({})

    for pd in t.pds:
        pd.behaviour = die_once
    assert (await t.chat(TEXT)).status_code == 200
    assert lost


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


async def test_without_a_healthy_encoder_the_pd_instance_expects_nothing(build: Build) -> None:
    t = await build()
    await t.encoders[0].serving.stop()
    await t.until_health(lambda instances: not instances["encode-0"]["healthy"])

    response = await t.chat(RED, TEXT)

    assert response.status_code == 200
    assert "ec_transfer_params" not in t.pd.received[0].body
    assert t.pd.received[0].body["messages"][0]["content"][0]["uuid"]
    assert await t.metric('epd_router_items_total{outcome="local"}') == 1


async def test_an_encoder_that_returns_is_used_again(build: Build) -> None:
    t = await build()
    await t.encoders[0].serving.stop()
    await t.until_health(lambda instances: not instances["encode-0"]["healthy"])
    await t.encoders[0].serving.start()
    await t.until_health(lambda instances: bool(instances["encode-0"]["healthy"]))

    await t.chat(RED)
    await t.encoders[0].until(lambda encoder: len(encoder.received) == 1)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_goes_away_ends_the_work_on_both_sides(
    build: Build, streamed: bool
) -> None:
    t = await build()
    t.encoders[0].behaviour = forever
    t.pd.behaviour = forever

    chat = asyncio.create_task(t.chat(RED, stream=streamed))
    for instance in (t.encoders[0], t.pd):
        await instance.until(lambda i: len(i.received) == 1)
    chat.cancel()

    for instance in (t.encoders[0], t.pd):
        await instance.until(lambda i: i.aborted == 1)
    await t.until_metric('epd_router_client_disconnects_total{endpoint="/v1/chat/completions"}', 1)
    assert await t.metric('epd_router_items_total{outcome="cancelled"}') == 1


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


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [(NackCode.TOO_LARGE, 413, False), (NackCode.UNAVAILABLE, 503, True)],
)
@pytest.mark.parametrize("form", ["plain", "streamed"])
async def test_a_failed_request_is_answered_with_the_reason_from_the_control_channel(
    build: Build, code: NackCode, status: int, retry: bool, form: str
) -> None:
    t = await build()

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


async def test_an_encoder_that_the_pd_instance_refuses_is_replaced_by_another(
    build: Build,
) -> None:
    t = await build(encoders=2)

    async def generate(received: Received) -> Response:
        await t.control.refuse(received.params, NackCode.INCOMPATIBLE, "serves something else")
        await asyncio.gather(*(e.until(lambda e: len(e.received) == 1) for e in t.encoders))
        return JSONResponse({})

    t.pd.behaviour = generate
    assert (await t.chat(RED)).status_code == 200
    await t.until_metric('epd_router_items_total{outcome="retried"}', 1)


async def test_without_another_encoder_a_refusal_leads_to_local_encoding(build: Build) -> None:
    t = await build()
    told = until_told_to_encode(t)

    async def generate(received: Received) -> Response:
        await t.control.refuse(received.params, NackCode.NO_COMMON_PATH, "no path from there")
        return await told(received)

    t.pd.behaviour = generate
    response = await t.chat(RED)
    assert "refused: 'no path from there'" in response.json()["reason"]
    assert await t.metric('epd_router_fallbacks_total{phase="encode",fallback="local"}') == 1


@pytest.mark.parametrize("code", [NackCode.INCOMPATIBLE, NackCode.NO_COMMON_PATH])
async def test_other_refusals_do_not_hide_the_instances_own_error(
    build: Build, code: NackCode
) -> None:
    t = await build()

    async def generate(received: Received) -> Response:
        await t.control.refuse(received.params, code, "encodes by itself")
        return await refuse(500, "engine error")(received)

    t.pd.behaviour = generate
    response = await t.chat(RED)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "engine error"


async def test_a_streamed_request_that_fails_at_once_gets_a_status(build: Build) -> None:
    t = await build()

    async def pieces() -> AsyncIterator[bytes]:
        yield b'data: {"er'
        await asyncio.sleep(0)
        yield b'ror": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n'
        try:
            await asyncio.Event().wait()
        finally:
            await t.pd.count_abort()

    t.pd.behaviour = stream(pieces)
    response = await t.chat(TEXT, stream=True)
    await t.pd.until(lambda pd: pd.aborted == 1)
    assert response.status_code == 400
    assert response.json() == {"error": {"message": "too long", "code": 400}}


async def test_a_lost_pd_instance_is_replaced_with_fresh_transfers(build: Build) -> None:
    t = await build(pds=2)

    def dies(pd: StandIn, other: StandIn) -> Behaviour:
        async def behave(received: Received) -> Response:
            if other.received:
                return await answer(received)
            asyncio.get_running_loop().call_soon(pd.serving.drop_connections)
            return await forever(received)

        return behave

    t.pds[0].behaviour = dies(t.pds[0], t.pds[1])
    t.pds[1].behaviour = dies(t.pds[1], t.pds[0])

    assert (await t.chat(RED)).status_code == 200
    ids = [pd.received[0].params["transfers"][0]["transfer_id"] for pd in t.pds]
    assert ids[0] != ids[1]
    assert await t.metric('epd_router_fallbacks_total{phase="answer",fallback="retried"}') == 1


async def test_a_broken_connection_to_the_only_pd_instance_is_tried_again(build: Build) -> None:
    t = await build()

    async def generate(received: Received) -> Response:
        if len(t.pd.received) == 2:
            return await answer(received)
        asyncio.get_running_loop().call_soon(t.pd.serving.drop_connections)
        return await forever(received)

    t.pd.behaviour = generate
    assert (await t.chat(TEXT)).status_code == 200


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


async def test_a_request_is_not_sent_to_every_pd_instance_in_turn(build: Build) -> None:
    t = await build(pds=3)

    def dying(pd: StandIn) -> Behaviour:
        async def behave(received: Received) -> Response:
            asyncio.get_running_loop().call_soon(pd.serving.drop_connections)
            return await forever(received)

        return behave

    for pd in t.pds:
        pd.behaviour = dying(pd)
    response = await t.chat(TEXT)
    assert response.status_code == 503
    assert sum(len(pd.received) for pd in t.pds) == 2


@pytest.mark.parametrize("begun", [b"", b'data: {"n"'], ids=["headers", "half an event"])
async def test_a_stream_of_which_a_client_has_nothing_is_asked_for_elsewhere(
    build: Build, begun: bytes
) -> None:
    """Engines send a stream's headers at once, and the first token when the items are there."""
    t = await build(pds=2)
    first: list[StandIn] = []

    def behaving(pd: StandIn) -> Behaviour:
        async def pieces() -> AsyncIterator[bytes]:
            if first == [pd]:
                yield begun
                await asyncio.sleep(0.1)
                pd.serving.drop_connections()
                await asyncio.Event().wait()
            yield b'data: {"n": 1}\n\n'
            yield b"data: [DONE]\n\n"

        async def behave(received: Received) -> Response:
            first.append(pd)
            return await stream(pieces)(received)

        return behave

    for pd in t.pds:
        pd.behaviour = behaving(pd)
    response = await t.chat(RED, stream=True)

    assert response.status_code == 200
    assert response.content == b'data: {"n": 1}\n\ndata: [DONE]\n\n'
    assert [len(pd.received) for pd in t.pds] == [1, 1]
    assert await t.metric('epd_router_fallbacks_total{phase="answer",fallback="retried"}') == 1


async def test_a_pd_instance_lost_within_a_stream_ends_it_with_an_error(build: Build) -> None:
    t = await build()

    async def pieces() -> AsyncIterator[bytes]:
        yield b'data: {"n": 1}\n\n'
        t.pd.serving.drop_connections()
        await asyncio.Event().wait()

    t.pd.behaviour = stream(pieces)
    response = await t.chat(TEXT, stream=True)

    assert response.status_code == 200
    first, last, rest = response.text.split("\n\n")
    assert first == 'data: {"n": 1}'
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "instance_lost"
    assert rest == ""


LAST_WORDS = {
    "chat": b"data: [DONE]\n\n",
    "messages": b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
    "responses": b'event: response.completed\ndata: {"type": "response.completed"}\n\n',
}


@pytest.mark.parametrize("last", LAST_WORDS.values(), ids=LAST_WORDS)
@pytest.mark.parametrize("together", [True, False])
async def test_a_pd_instance_lost_after_its_last_word_was_not_lost_within_the_stream(
    build: Build, last: bytes, together: bool
) -> None:
    t = await build()
    first = b'data: {"n": 1}\n\n'

    async def pieces() -> AsyncIterator[bytes]:
        for piece in [first + last] if together else [first, last]:
            yield piece
            await asyncio.sleep(0.05)
        t.pd.serving.drop_connections()
        await asyncio.Event().wait()

    t.pd.behaviour = stream(pieces)
    response = await t.chat(TEXT, stream=True)
    assert response.content == first + last


async def test_a_silent_pd_instance_does_not_hang_the_client(build: Build) -> None:
    t = await build(wait_timeout_s=0.1, idle_timeout_s=0.2)
    t.pd.behaviour = forever
    response = await t.chat(RED)
    assert response.status_code == 504
    await t.pd.until(lambda pd: pd.aborted == 1)


async def test_a_late_encode_job_is_ended_after_the_answer(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_portable.router.exchange.JOB_GRACE_S", 0.1)
    t = await build()
    t.encoders[0].behaviour = forever

    async def generate(received: Received) -> Response:
        await t.encoders[0].until(lambda encoder: len(encoder.received) == 1)
        return await answer(received)

    t.pd.behaviour = generate
    assert (await t.chat(RED)).status_code == 200
    await t.encoders[0].until(lambda encoder: encoder.aborted == 1)


async def test_noise_on_the_control_channel_is_survived(build: Build) -> None:
    t = await build()

    async def generate(received: Received) -> Response:
        await t.control.send(received.params["reply_to"], b"noise")
        await t.control.refuse(received.params, NackCode.TOO_LARGE, "far too large")
        return Response(status_code=500)

    t.pd.behaviour = generate
    assert (await t.chat(RED)).status_code == 413


async def test_a_message_beyond_the_limit_does_not_reach_the_router(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    t = await build()

    async def generate(received: Received) -> Response:
        await t.control.send(received.params["reply_to"], bytes(2 * codec.MAX_MESSAGE_BYTES))
        return Response(status_code=500)

    t.pd.behaviour = generate
    assert (await t.chat(RED)).status_code == 500
    assert f"at most {codec.MAX_MESSAGE_BYTES} are allowed" not in caplog.text


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


RESPONSES = b'event: response.created\ndata: {"type": "response.created", "sequence_number": 4}\n\n'
MESSAGES = b'event: message_start\ndata: {"type": "message_start"}\n\n'


@pytest.mark.parametrize(
    ("path", "begin"), [("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)]
)
async def test_a_cut_stream_ends_with_the_error_event_of_its_interface(
    build: Build, path: str, begin: bytes
) -> None:
    t = await build()

    async def pieces() -> AsyncIterator[bytes]:
        yield begin
        await asyncio.sleep(0)
        t.pd.serving.drop_connections()
        await asyncio.Event().wait()

    t.pd.behaviour = stream(pieces)
    prompt = [{"role": "user", "content": "Hello"}]
    body = {"input": prompt, "messages": prompt, "max_tokens": 9, "stream": True}
    response = await t.client.post(path, json=body)
    first, name, data = response.content.partition(b"event: error\n")
    assert first == begin and name
    error = json.loads(data.removeprefix(b"data: "))
    assert error["type"] == "error"
    if path == "/v1/responses":
        assert error["sequence_number"] == 5
        assert (error["code"], error["param"]) == ("instance_lost", None)
        assert "incomplete" in error["message"]
    else:
        assert error["error"]["type"] == "api_error"
        assert "incomplete" in error["error"]["message"]


async def test_errors_of_the_router_have_the_form_of_the_interface_that_was_asked(
    build: Build,
) -> None:
    t = await build()
    refused = await t.client.post("/v1/messages", json={"max_tokens": 1})
    assert refused.status_code == 400
    assert refused.json()["type"] == "error"
    assert refused.json()["error"].keys() == {"type", "message"}
    assert refused.json()["error"]["type"] == "invalid_request_error"
    refused = await t.client.post("/v1/responses", json={})
    assert refused.json()["error"]["code"] == "missing_field"


async def test_a_stream_of_anthropics_that_fails_before_its_first_token_is_tried_elsewhere(
    build: Build,
) -> None:
    t = await build(pds=2)
    asked: list[str] = []

    async def fail(received: Received) -> Response:
        asked.append(received.path)
        if len(asked) > 1:
            return await answer(received)

        async def pieces() -> AsyncIterator[bytes]:
            yield b"event: "
            yield b'error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}'
            yield b"\n\n"

        return await stream(pieces)(received)

    for pd in t.pds:
        pd.behaviour = fail
    prompt = [{"role": "user", "content": "Hello"}]
    body = {"messages": prompt, "max_tokens": 9, "stream": True}
    response = await t.client.post("/v1/messages", json=body)
    assert response.status_code == 200
    assert b"internal_error" not in response.content
    assert len(asked) == 2
