"""Anthropic's package against ``/v1/messages``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.conftest import KEY, MODEL, QUESTION, Encodes, base64_of, data_url, seen_in

GREEDY = {"temperature": 0}
"""The engine takes it; the package no longer knows it."""


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def messages(source: dict[str, str]) -> Any:
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": blocks}]


def inline(seed: int) -> dict[str, str]:
    return {"type": "base64", "media_type": "image/png", "data": base64_of(seed)}


@pytest.mark.parametrize(
    ("seed", "source"), [(50, inline(50)), (52, {"type": "url", "url": data_url(52)})]
)
def test_picture_in_a_message_is_answered_whole_and_streamed(
    client: anthropic.Anthropic, encodes: Encodes, seed: int, source: dict[str, str]
) -> None:
    asked: Any = {"model": MODEL, "messages": messages(source), "max_tokens": 24}
    with encodes(1):
        answer = client.messages.create(**asked, extra_body=GREEDY)
    [block] = answer.content
    assert block.type == "text" and block.text == seen_in(seed)
    assert answer.stop_reason == "end_turn" and answer.usage.input_tokens > 16
    with encodes(1), client.messages.stream(**asked, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == seen_in(seed)
        assert stream.get_final_message().usage.output_tokens > 1


def test_tokens_are_counted_without_encoding(client: anthropic.Anthropic, encodes: Encodes) -> None:
    with encodes(0):
        counted = client.messages.count_tokens(model=MODEL, messages=messages(inline(53)))
    assert counted.input_tokens > 16


def test_refusal_is_the_clients_own_kind_of_error(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"image|picture"):
        client.messages.create(
            model=MODEL,
            messages=messages({"type": "base64", "media_type": "text/plain", "data": "AAAA"}),
            max_tokens=4,
        )
