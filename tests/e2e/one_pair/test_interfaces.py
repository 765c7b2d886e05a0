"""Pictures in Responses requests and in Anthropic's messages are encoded apart, too."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from tests.e2e.asking import TIMEOUT_S, picture
from tests.e2e.conftest import Pair

WORDS = "What is in each picture?"


def url_of(seed: int) -> str:
    url: str = picture(seed)["image_url"]["url"]
    return url


def seen(seed: int) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url_of(seed), "detail": "auto"}


def block(seed: int) -> dict[str, Any]:
    head, _, data = url_of(seed).partition(";base64,")
    source = {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
    return {"type": "image", "source": source}


def responses(seed: int) -> dict[str, Any]:
    called = {"call_id": "c", "type": "function_call", "name": "look", "arguments": "{}"}
    asked = [seen(seed), {"type": "input_text", "text": WORDS}]
    return {
        "model": "demo",
        "temperature": 0,
        "max_output_tokens": 8,
        "input": [
            {"role": "user", "content": asked},
            called,
            {"type": "function_call_output", "call_id": "c", "output": [seen(seed + 1)]},
            {"role": "user", "content": WORDS},
        ],
    }


def messages(seed: int) -> dict[str, Any]:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block(seed + 1)]}
    asked = [block(seed), {"type": "text", "text": WORDS}, result]
    return {
        "model": "demo",
        "temperature": 0,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": asked}],
    }


def answer(url: str, path: str, request: dict[str, Any]) -> Any:
    reply = httpx.post(url + path, json=request, timeout=TIMEOUT_S, trust_env=False)
    assert reply.status_code == 200, reply.text
    fields = reply.json()
    return [part["text"] for part in (fields.get("output") or [fields])[0]["content"]]


# Under one name, one picture would be taken for the other.
FORGED = json.loads(json.dumps(responses(700)).replace('"detail":', '"uuid": "forged", "detail":'))
REQUESTS = {
    "/v1/responses": (FORGED, responses(700)),
    "/v1/messages": (messages(710), messages(710)),
}


@pytest.mark.parametrize("path", REQUESTS)
def test_two_pictures_of_a_request_are_encoded_apart(pair: Pair, path: str) -> None:
    (request, as_one_process), split = REQUESTS[path], pair.split
    begin_s = time.monotonic()
    got = answer(split.url, path, request)
    begun = split.events("encode.begin", since_s=begin_s)
    assert {each["instance"] for each in begun} == {"encode-0"}
    assert len({item for each in begun for item in each["items"]}) == 2
    assert len({each["mm_hash"] for each in split.events("item.placed", since_s=begin_s)}) == 2
    assert got == answer(pair.reference_url, path, as_one_process)
