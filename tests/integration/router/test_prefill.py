"""Requests to decode instances: who computes their prompts, and what when that goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from epd_portable.wire.messages import EncodeFailed
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import (
    Behaviour,
    Received,
    answer,
    forever,
    full,
    in_turn,
    refuse,
    says,
    stream,
)
from tests.integration.router.test_requests import BLUE, RED, TEXT

ASKED_FOR_KV = {"do_remote_decode": True, "do_remote_prefill": False}
KV = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "127.0.0.1"}
SPLIT = ("prefill", "decode")


compute = says({"choices": [], "kv_transfer_params": KV})
"""What a prefill instance does."""


async def split(build: Build, *roles: str, encoders: int = 0, **settings: Any) -> Topology:
    """Return a topology whose prefill instances compute."""
    t = await build(encoders=encoders, pds=roles or SPLIT, **settings)
    for pd in t.pds:
        if pd.role in ("prefill", "encode-prefill"):
            pd.behaviour = compute
    return t


def count(where: str) -> str:
    return f'epd_router_prefills_total{{where="{where}"}}'


def fallback(name: str, phase: str = "prefill") -> str:
    return f'epd_router_fallbacks_total{{phase="{phase}",fallback="{name}"}}'


async def test_a_prompt_is_computed_by_one_instance_and_answered_by_the_other(build: Build) -> None:
    t = await split(build)
    prefill, decode = t.pds
    fields = {"max_completion_tokens": 7, "min_tokens": 3, "logprobs": True, "top_logprobs": 2}
    assert (await t.chat(TEXT, **fields)).status_code == 200
    (asked,) = prefill.received
    assert (asked.body["max_tokens"], asked.body["stream"]) == (1, False)
    assert not fields.keys() & asked.body.keys()
    assert asked.body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
    }
    (answered,) = decode.received
    assert answered.body["kv_transfer_params"] == KV
    assert {name: answered.body[name] for name in fields} == fields
    assert answered.body["messages"] == asked.body["messages"]
    assert await t.metric(count("disaggregated")) == 1


async def test_items_go_to_the_prefill_instance_and_media_to_both(build: Build) -> None:
    t = await split(build, encoders=1)
    assert (await t.chat(RED, TEXT)).status_code == 200
    prefill, decode = t.pds
    (transfer,) = prefill.received[0].params["transfers"]
    (job,) = t.encoders[0].received
    (sent,) = job.params["transfers"]
    assert sent["transfer_id"] == transfer["transfer_id"]
    assert sent["consumer"] == t.controls[0].address
    assert decode.received[0].params is None
    assert decode.received[0].body["messages"] == prefill.received[0].body["messages"]


@pytest.mark.parametrize("role", ["encode-prefill", "encode-prefill-decode"])
@pytest.mark.parametrize("encoders", [0, 1])
async def test_who_holds_the_encoder_shares_the_items_of_a_request_with_others(
    build: Build, role: str, encoders: int
) -> None:
    others = ["decode"] if role == "encode-prefill" else []
    t = await split(build, role, *[role] * (1 - encoders), *others, encoders=encoders)
    assert (await t.chat(RED, BLUE)).status_code == 200
    either = [*t.encoders, *(each for each in t.pds if each.role == role)]
    encoder = next(each for each in either if "consumer" in str(each.received[0].params))
    (computing,) = (each for each in either if each is not encoder)
    (job,), (asked,) = encoder.received, computing.received
    (sent,), (awaited,) = job.params["transfers"], asked.params["transfers"]
    assert sent["transfer_id"] == awaited["transfer_id"]
    assert sent["consumer"] == t.control_of(asked).address
    assert await t.metric('epd_router_items_total{outcome="local_first"}') == 1


async def test_whoever_is_not_busier_encodes_its_own_items(build: Build) -> None:
    t = await split(build, "encode-prefill-decode", "encode-prefill-decode", encoders=1)
    for _ in range(20):
        assert (await t.chat(RED)).status_code == 200
    assert all(pd.received for pd in t.pds)
    assert not any(received.params for each in t.pds for received in each.received)
    assert not t.encoders[0].received


async def test_an_item_whose_other_encoder_is_full_is_encoded_where_it_is_needed(
    build: Build,
) -> None:
    t = await split(build, "encode-prefill", "encode-prefill", "decode")

    async def full_as_encoder(received: Received) -> Response:
        if "consumer" in str(received.params):
            return await full(20_000)(received)
        # It computes once it is told to encode the item by itself.
        (transfer,) = received.params["transfers"]
        message = await t.control_of(received).receive_of(transfer["transfer_id"])
        assert isinstance(message, EncodeFailed)
        return await compute(received)

    for each in t.pds[:2]:
        each.behaviour = full_as_encoder
    assert (await t.chat(RED, BLUE)).status_code == 200
    jobs = [r for pd in t.pds for r in pd.received if "consumer" in str(r.params)]
    assert len(jobs) == 1
    await t.until_metric('epd_router_items_total{outcome="local"}', 1)


RESPONSES, COMPLETIONS, CHAT = "/v1/responses", "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


ONE_PROMPT_WITH_ONE_ANSWER: list[tuple[str, dict[str, Any], bool]] = [
    *((CHAT, {"messages": MESSAGES, name: 2}, False) for name in ("n", "prompt_logprobs")),
    *((CHAT, {"messages": MESSAGES, name: True}, False) for name in ("echo", "use_beam_search")),
    *((COMPLETIONS, {"prompt": prompt}, True) for prompt in ("Hello", [1, 2, 3])),
    *((COMPLETIONS, {"prompt": prompt}, False) for prompt in (["a", "b"], [[1], [2]])),
    ("/tokenize", {"prompt": "Hello"}, False),
    (RESPONSES, {"input": "Hello", "previous_response_id": "r"}, False),
    (RESPONSES, {"input": "Hello", "background": True}, False),
    (RESPONSES, {"input": "Hello", "tools": [{"type": "web_search"}]}, False),
    (RESPONSES, {"input": "Hello", "tools": [1]}, False),
]
"""Paths, bodies, and whether it is that."""


async def test_only_one_prompt_with_one_answer_is_prefilled_elsewhere(build: Build) -> None:
    t = await split(build)
    for path, fields, suited in ONE_PROMPT_WITH_ONE_ANSWER:
        for pd in t.pds:
            pd.received.clear()
        before = await t.metric(count("unsuited"))
        assert (await t.client.post(path, json=fields)).status_code == 200
        assert bool(t.pds[0].received) is suited, fields
        assert ("kv_transfer_params" in t.pds[1].received[0].body) is suited, fields
        assert await t.metric(count("unsuited")) == before + (not suited)


ASKED: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "input": [{"role": "user", "content": "Hello"}],
        "max_output_tokens": 9,
        "include": ["message.output_text.logprobs"],
        "tools": [{"type": "function", "name": "look"}],
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 9,
        "stop_sequences": ["x"],
    },
}


@pytest.mark.parametrize("path", ASKED)
async def test_prompts_of_other_interfaces_are_computed_apart_too(build: Build, path: str) -> None:
    t = await split(build)
    fields = ASKED[path]
    answered = await t.client.post(path, json={**fields, "stream": True})
    assert answered.status_code == 200
    (asked,) = t.pds[0].received
    assert asked.body["kv_transfer_params"] == ASKED_FOR_KV
    assert asked.body["stream"] is False
    longest = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    assert asked.body[longest] == 1
    assert not {"include", "stop_sequences"} & asked.body.keys()
    assert path != "/v1/responses" or asked.body["store"] is False
    (told,) = t.pds[1].received
    assert told.body == {**fields, "stream": True, "kv_transfer_params": KV}


@pytest.mark.parametrize("path", ASKED)
async def test_engines_that_say_nothing_of_kv_there_are_not_asked_again(
    build: Build, path: str
) -> None:
    t = await split(build)
    t.pds[0].behaviour = answer
    for _ in range(3):
        assert (await t.client.post(path, json=ASKED[path])).status_code == 200
    assert len(t.pds[0].received) == 1
    assert len(t.pds[1].received) == 3
    assert await t.metric(count("unsuited")) == 3


@pytest.mark.parametrize(
    "behaviour", [refuse(500), refuse(503), answer], ids=["500", "503", "no KV"]
)
async def test_another_prefill_instance_is_asked_and_then_the_decode_instance(
    build: Build, behaviour: Behaviour
) -> None:
    t = await split(build, "prefill", "prefill", "decode")
    for pd in t.pds[:2]:
        pd.behaviour = behaviour
    assert (await t.chat(TEXT)).status_code == 200
    assert [len(pd.received) for pd in t.pds] == [1, 1, 1]
    assert "kv_transfer_params" not in t.pds[2].received[0].body
    assert await t.metric(fallback("retried")) == 1
    assert await t.metric(fallback("local")) == 1
    assert await t.metric(count("local")) == 1


async def test_a_prefill_instance_that_is_gone_costs_no_answer(build: Build) -> None:
    t = await split(build, encoders=1)
    t.pds[0].behaviour = forever
    asking = asyncio.create_task(t.chat(RED))
    await t.pds[0].until(lambda pd: len(pd.received) == 1)
    await t.pds[0].serving.stop()
    assert (await asking).status_code == 200
    assert t.pds[1].received[0].params is None
    assert await t.metric(fallback("local")) == 1
    await t.until_health(lambda seen: not seen["pd-0"]["healthy"])
    assert (await t.chat(RED)).status_code == 200
    assert await t.metric(count("unavailable")) == 1
    assert (await t.client.get("/health")).status_code == 200


def after(delay_s: float, behaviour: Behaviour) -> Behaviour:
    async def behave(received: Received) -> Response:
        await asyncio.sleep(delay_s)
        return await behaviour(received)

    return behave


async def half_an_answer() -> AsyncIterator[bytes]:
    yield b'{"choices": ['
    await asyncio.Event().wait()


@pytest.mark.parametrize("behaviour", [forever, stream(half_an_answer)])
async def test_a_silent_prefill_instance_costs_no_answer(
    build: Build, behaviour: Behaviour
) -> None:
    t = await split(build, idle_timeout_s=1.5, wait_timeout_s=0.5)
    t.pds[0].behaviour = behaviour
    t.pds[1].behaviour = after(0.5, answer)
    assert (await t.chat(TEXT)).status_code == 200
    late = 'epd_router_fallbacks_total{phase="prefill",failure="timeout",fallback="local"}'
    assert await t.metric(late) == 1


async def test_a_silent_decode_instance_is_given_up_however_long_the_prefill_took(
    build: Build,
) -> None:
    t = await split(build, idle_timeout_s=1.5, wait_timeout_s=0.5)
    t.pds[0].behaviour = after(0.5, compute)
    t.pds[1].behaviour = forever
    answered = await t.chat(TEXT)
    assert (answered.status_code, answered.json()["error"]["code"]) == (504, "timeout")
    assert t.pds[1].received[0].body["kv_transfer_params"] == KV


async def test_a_client_that_leaves_ends_the_prefill(build: Build) -> None:
    t = await split(build)
    t.pds[0].behaviour = forever
    asking = asyncio.create_task(t.chat(TEXT))
    await t.pds[0].until(lambda pd: len(pd.received) == 1)
    asking.cancel()
    await t.pds[0].until(lambda pd: pd.aborted == 1)
    assert not t.pds[1].received


async def test_what_a_prefill_instance_refuses_is_refused(build: Build) -> None:
    t = await split(build)
    t.pds[0].behaviour = refuse(400, "the prompt is too long")
    answered = await t.chat(TEXT)
    assert answered.status_code == 400
    assert answered.json()["error"]["message"] == "the prompt is too long"
    assert not t.pds[1].received


async def test_a_lost_decode_instance_is_followed_by_another_with_kv_of_its_own(
    build: Build,
) -> None:
    t = await split(build, "prefill", "decode", "decode")

    in_turn(t.pds[1:], refuse(500), answer)

    async def compute_elsewhere(received: Received) -> Response:
        blocks = [[len(t.pds[0].received)] * 100 * len(t.pds[0].received)]
        return JSONResponse({"kv_transfer_params": {**KV, "remote_block_ids": blocks}})

    t.pds[0].behaviour = compute_elsewhere
    assert (await t.chat(TEXT)).status_code == 200
    assert len(t.pds[0].received) == 2
    told = [pd.received[0].body["kv_transfer_params"]["remote_block_ids"] for pd in t.pds[1:]]
    assert sorted(told) == [[[1] * 100], [[2] * 200]]
    assert await t.metric(fallback("retried", "answer")) == 1


async def test_without_a_decode_instance_nobody_answers(build: Build) -> None:
    t = await split(build)
    await t.pds[1].serving.stop()
    await t.until_health(lambda seen: not seen["pd-1"]["healthy"])
    answered = await t.chat(TEXT)
    assert answered.status_code == 503
    assert not t.pds[0].received
    assert (await t.client.get("/health")).status_code == 503
