"""OpenAI's own package, by each of its interfaces that the engine serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.clients.conftest import (
    KEY,
    MODEL,
    QUESTION,
    Encodes,
    base64_of,
    data_url,
    question,
    seen_in,
)

PAINT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "paint",
        "strict": True,
        "description": "Paint something.",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "paint"}}


class Shape(BaseModel):
    colour: Literal["red", "green", "blue"]


@pytest.fixture(scope="module")
def client(v1: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=v1, api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def ask(client: Any, picture: int, **more: Any) -> Any:
    fixed: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}
    fixed["messages"] = question(picture)
    return client.chat.completions.create(**(fixed | more))


def test_a_picture_in_a_chat(client: openai.OpenAI, encodes: Encodes) -> None:
    with encodes(1):
        answer = ask(client, 20)
    assert answer.choices[0].message.content == seen_in(20)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens > 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    [item] = answer.ec_transfer_params["items"]
    assert item["source"] == "transfer"


def test_a_picture_in_a_chat_that_is_streamed_with_usage(
    client: openai.OpenAI, encodes: Encodes
) -> None:
    with encodes(1):
        chunks = list(ask(client, 21, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == seen_in(21)
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens > 1


def test_several_pictures_in_one_message(client: openai.OpenAI, encodes: Encodes) -> None:
    parts = [question(seed)[0]["content"][0] for seed in (22, 23)]
    parts.append({"type": "text", "text": "What is in the second picture?"})
    with encodes(2):
        answer = ask(client, 22, messages=[{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == seen_in(23)


async def test_many_chats_at_once(v1: str, encodes: Encodes) -> None:
    seeds = range(30, 42)
    async with openai.AsyncOpenAI(base_url=v1, api_key=KEY, max_retries=0, timeout=120) as client:

        async def one(seed: int) -> str:
            stream = await ask(client, seed, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        with encodes(len(seeds)):
            answers = await asyncio.gather(*map(one, seeds))
    assert answers == [seen_in(seed) for seed in seeds]


def test_stream_closed_early_leaves_connection_usable(client: openai.OpenAI) -> None:
    stream = ask(client, 24, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert ask(client, 24).choices[0].message.content == seen_in(24)


def test_completions(client: openai.OpenAI) -> None:
    fixed: dict[str, Any] = {"model": MODEL, "prompt": "hello", "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**fixed, logprobs=1)
    chunks = list(client.completions.create(**fixed, stream=True))
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks)
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.tokens)


def test_a_picture_in_a_response(client: openai.OpenAI, encodes: Encodes) -> None:
    parts = [
        {"type": "input_image", "image_url": data_url(25), "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": [{"role": "user", "content": parts}],
        "temperature": 0,
        "max_output_tokens": 24,
    }
    with encodes(1):
        answer = client.responses.create(**asked)
    assert answer.output_text == seen_in(25)
    with encodes(1):
        events = list(client.responses.create(**asked, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == seen_in(25)


def test_stored_responses_are_refused_with_the_reason(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="hello", max_output_tokens=4)
    with pytest.raises(openai.NotFoundError, match=r"not kept|not found"):
        client.responses.retrieve(answer.id)


def test_a_tool_that_must_be_called(client: openai.OpenAI, encodes: Encodes) -> None:
    with encodes(1):
        answer = ask(client, 26, tools=[PAINT], tool_choice=NAMED, max_tokens=48)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
    chunks = list(ask(client, 26, tools=[PAINT], tool_choice=NAMED, max_tokens=48, stream=True))
    calls = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or ()]
    arguments = "".join(call.function.arguments or "" for call in calls)
    assert json.loads(arguments)["colour"] in ("red", "blue")


def test_a_tool_that_may_be_called_and_the_answer_of_one(client: openai.OpenAI) -> None:
    answer = ask(client, 27, tools=[PAINT], tool_choice="auto", parallel_tool_calls=False)
    assert answer.choices[0].message.content == seen_in(27)
    called = {
        "id": "call-1",
        "type": "function",
        "function": {"name": "paint", "arguments": '{"colour": "red"}'},
    }
    messages: Any = [
        *question(27),
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call-1", "content": "painted"},
        {"role": "user", "content": QUESTION},
    ]
    told = ask(client, 27, messages=messages, tools=[PAINT], max_tokens=8)
    assert told.choices[0].finish_reason in ("stop", "length")


def test_an_answer_in_a_given_form(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=question(28), response_format=Shape, temperature=0, max_tokens=48
    )
    assert answer.choices[0].message.parsed is not None


def test_fields_of_the_engine_and_of_other_services(client: openai.OpenAI) -> None:
    answer = ask(
        client,
        29,
        n=2,
        logprobs=True,
        top_logprobs=2,
        logit_bias={"5": -100},
        max_tokens=6,
        temperature=1,
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        user="somebody",
        prompt_cache_key="k",
        safety_identifier="s",
        verbosity="low",
        extra_body={"ignore_eos": True, "top_k": 1, "thinking": {"type": "disabled"}},
    )
    assert len(answer.choices) == 2
    assert [len(choice.logprobs.content) for choice in answer.choices] == [6, 6]


def test_the_id_of_a_request_comes_back(client: openai.OpenAI) -> None:
    answer = ask(client, 29, extra_headers={"X-Request-ID": "mine-1"})
    assert answer._request_id == "mine-1"
    assert ask(client, 29)._request_id


SOUND = {"type": "input_audio", "input_audio": {"data": base64_of(1), "format": "wav"}}
ELSEWHERE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}


def alone(part: Any) -> dict[str, Any]:
    """Return the messages of a request with one part."""
    return {"messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"model": "another"}, openai.NotFoundError, "another"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        (alone(ELSEWHERE), openai.BadRequestError, "allowed_domains"),
        (alone(SOUND), openai.BadRequestError, "audio"),
    ],
    ids=["model", "value", "address", "sound"],
)
def test_refusal_is_the_clients_own_kind_of_error(
    client: openai.OpenAI, changed: Any, kind: type[openai.APIStatusError], words: str
) -> None:
    asked = {"model": MODEL, "messages": question(20), "max_tokens": 4, **changed}
    with pytest.raises(kind, match=words):
        client.chat.completions.create(**asked)


def test_models_are_listed_and_other_tasks_are_refused(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.APIStatusError) as refused:
        client.embeddings.create(model=MODEL, input="hello")
    assert refused.value.status_code in (400, 404)
    assert "unknown_path" not in refused.value.message
