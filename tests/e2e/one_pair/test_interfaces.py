"""Pictures in Responses requests and in Anthropic's messages are encoded apart, too."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.asking import TIMEOUT_S, picture
from tests.e2e.conftest import Pair

pytestmark = [pytest.mark.e2e, pytest.mark.needs_vllm, pytest.mark.timeout(900)]

WORDS = "What is in each picture?"


def url_of(seed: int) -> str:
    url: str = picture(seed)["image_url"]["url"]
    return url


def seen(seed: int) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url_of(seed), "detail": "auto", "uuid": "forged"}


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


@pytest.mark.parametrize(
    ("path", "request_of", "seed"),
    [("/v1/responses", responses, 700), ("/v1/messages", messages, 710)],
)
def test_two_pictures_are_encoded_apart_and_answered_as_by_one_process(
    pair: Pair, path: str, request_of: Any, seed: int
) -> None:
    pair = pair.since_now()
    request = request_of(seed)

    split = answer(pair.split.url, path, request)

    assert len(set(pair.split.encoded_by("encode"))) == 2
    assert len({event["mm_hash"] for event in pair.split.events("item.placed")}) == 2
    assert pair.split.encoded_by("prefill_decode") == []
    assert "forged" not in pair.split.encoded_by("encode")
    assert split == answer(pair.reference_url, path, request)
