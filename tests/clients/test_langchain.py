"""LangChain's model for OpenAI's interface."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from tests.clients.conftest import KEY, MODEL, QUESTION, Encodes, base64_of, question, seen_in


def model(v1: str, **more: Any) -> ChatOpenAI:
    fixed: dict[str, Any] = {"model": MODEL, "base_url": v1, "api_key": KEY}
    return ChatOpenAI(**fixed, temperature=0, max_retries=0, timeout=120, **more)


def as_openai(seed: int) -> HumanMessage:
    return HumanMessage(content=question(seed)[0]["content"])


def as_langchain(seed: int) -> HumanMessage:
    block = {"type": "image", "base64": base64_of(seed), "mime_type": "image/png"}
    return HumanMessage(content=[block, {"type": "text", "text": QUESTION}])


@pytest.mark.parametrize("message", [as_openai, as_langchain])
def test_a_picture(v1: str, encodes: Encodes, message: Any) -> None:
    with encodes(1):
        answer = model(v1, max_completion_tokens=24).invoke([message(60)])
    assert answer.content == seen_in(60)
    assert answer.usage_metadata is not None


def test_a_picture_that_is_streamed(v1: str, encodes: Encodes) -> None:
    chat = model(v1, max_completion_tokens=24, stream_usage=True)
    with encodes(1):
        chunks = list(chat.stream([as_langchain(61)]))
    assert "".join(str(chunk.content) for chunk in chunks) == seen_in(61)
    assert any(chunk.usage_metadata for chunk in chunks)


def test_a_picture_through_the_responses_interface(v1: str, encodes: Encodes) -> None:
    chat = model(v1, max_tokens=24, use_responses_api=True)
    with encodes(1):
        assert chat.invoke([as_openai(67)]).text == seen_in(67)
    with encodes(1):
        assert "".join(chunk.text for chunk in chat.stream([as_openai(67)])) == seen_in(67)
