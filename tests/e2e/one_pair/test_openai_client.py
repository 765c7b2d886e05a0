"""OpenAI's package, in the version that comes with vLLM, asks the front as any service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from epd_portable.demo.pictures import QUESTIONS, QuestionKind, draw
from tests.e2e.asking import TIMEOUT_S, picture, text
from tests.e2e.conftest import Pair

ASK = QUESTIONS[QuestionKind.DESCRIBE]
SEED = 90
SEEN = draw(SEED).scene.answer(QuestionKind.DESCRIBE)


@pytest.fixture(scope="module")
def client(pair: Pair) -> Iterator[openai.OpenAI]:
    url = f"{pair.split.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def asked(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [picture(SEED), text(ASK)]}]
    return {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 24, **more}


def test_a_picture_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**asked())
    assert answer.choices[0].message.content == SEEN
    stream = client.chat.completions.create(
        **asked(stream=True, stream_options={"include_usage": True})
    )
    *chunks, last = stream
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SEEN
    assert last.usage == answer.usage


def test_a_picture_in_a_response(client: openai.OpenAI) -> None:
    seen = {"type": "input_image", "image_url": draw(SEED).data_url(), "detail": "auto"}
    content: Any = [seen, {"type": "input_text", "text": ASK}]
    answer = client.responses.create(
        model="demo",
        input=[{"role": "user", "content": content}],
        temperature=0,
        max_output_tokens=24,
    )
    assert answer.output_text == SEEN


def test_models_are_listed_and_errors_are_the_packages_own(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    with pytest.raises(openai.NotFoundError, match="another"):
        client.chat.completions.create(**asked(model="another"))
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            **asked(
                messages=[
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
                        ],
                    }
                ]
            )
        )
