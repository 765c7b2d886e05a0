"""LiteLLM, by its providers for servers like this one."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

from tests.clients.conftest import KEY, MODEL, Encodes, question, seen_in

PROVIDERS = ("openai", "hosted_vllm")


def asked(v1: str, provider: str, seed: int, **more: Any) -> dict[str, Any]:
    fixed = {"model": f"{provider}/{MODEL}", "api_base": v1, "api_key": KEY}
    more = {"temperature": 0, "max_tokens": 24, "timeout": 120, "num_retries": 0, **more}
    return {**fixed, "messages": question(seed), **more}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_picture_is_answered_whole_and_streamed(v1: str, encodes: Encodes, provider: str) -> None:
    with encodes(1):
        answer = litellm.completion(**asked(v1, provider, 70))
    assert answer.choices[0].message.content == seen_in(70)
    assert answer.usage.completion_tokens > 1
    more = {"stream": True, "stream_options": {"include_usage": True}}
    with encodes(1):
        chunks = list(litellm.completion(**asked(v1, provider, 71, **more)))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == seen_in(71)


def test_a_completion_of_text(v1: str) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        api_base=v1,
        api_key=KEY,
        prompt="hello",
        max_tokens=4,
    )
    assert answer.choices[0].text


def test_a_refusal_is_its_own_kind_of_error(v1: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked(v1, "openai", 70), "model": "openai/another"})
