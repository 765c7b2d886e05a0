"""Requests to an OpenAI endpoint, and the comparison of their answers."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from epd_portable.demo.pictures import draw

TIMEOUT_S = 120.0
MOST_TOKENS = 3000
"""Tokens of a response that a client ends by disconnecting: more than any test reads."""
TOP_LOGPROBS = 5
TOLERANCE = 1e-3
"""Between log-probabilities of one token in float32."""
TOLERANCE_BFLOAT16 = 0.1


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A chat completion: its tokens, their log-probabilities and the items' reports.

    Attributes:
        alternatives: For each token, log-probabilities of the likeliest ones at its place.
    """

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    alternatives: tuple[dict[str, float], ...]
    items: tuple[dict[str, Any], ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    @property
    def sources(self) -> list[str]:
        return [item["source"] for item in self.items]


def picture(seed: int, size: int = 112) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": draw(seed, size).data_url()}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def body(content: Sequence[dict[str, Any]] | str, **extra: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    fixed = {"model": "demo", "temperature": 0, "max_tokens": 16, "logprobs": True}
    fixed["top_logprobs"] = TOP_LOGPROBS
    return {**fixed, "messages": messages, **extra}


KEY = "sk-of-tests-0123456789"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
"""Sent with each request; servers without keys do not read it."""


def post(
    url: str, request: dict[str, Any], *, headers: dict[str, str] | None = None
) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/chat/completions",
        json=request,
        headers={**AUTHORIZED, **(headers or {})},
        timeout=TIMEOUT_S,
        trust_env=False,
    )


def ask(
    url: str,
    content: Sequence[dict[str, Any]] | str,
    *,
    headers: dict[str, str] | None = None,
    **extra: Any,
) -> Answer:
    return answer_of(post(url, body(content, **extra), headers=headers))


def answer_of(response: httpx.Response) -> Answer:
    assert response.status_code == 200, response.text
    answer = response.json()
    # Before vLLM 0.26 the field is within another.
    fields = {**(answer.get("kv_transfer_params") or {}), **answer}
    items = (fields.get("ec_transfer_params") or {}).get("items", ())
    return _answer(answer["choices"][0]["logprobs"]["content"], items)


def ask_streamed(url: str, content: Sequence[dict[str, Any]] | str, **extra: Any) -> Answer:
    steps = []
    with httpx.stream(
        "POST",
        f"{url}/v1/chat/completions",
        json=body(content, stream=True, **extra),
        headers=AUTHORIZED,
        timeout=TIMEOUT_S,
        trust_env=False,
    ) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            steps += (choice["logprobs"] or {}).get("content", ())
    return _answer(steps, ())


@contextmanager
def generating(url: str) -> Iterator[None]:
    """Let an engine generate text during the block, from its first token on.

    The client disconnects at the end.

    Raises:
        AssertionError: The response ended before the block.
    """
    first, ended = threading.Event(), threading.Event()
    request = body("Tell me.", stream=True, max_tokens=MOST_TOKENS, ignore_eos=True)

    def read() -> bool:
        with httpx.stream(
            "POST",
            f"{url}/v1/chat/completions",
            json=request,
            headers=AUTHORIZED,
            timeout=TIMEOUT_S,
            trust_env=False,
        ) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if '"logprobs":{' in line:
                    first.set()
                if ended.is_set():
                    return True
        return False

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            while not first.wait(0.1):
                assert not reading.done(), reading.result()
            yield
        finally:
            ended.set()
    assert reading.result(), "the response was to take longer"


def ask_all(url: str, contents: Iterable[Sequence[dict[str, Any]] | str]) -> list[Answer]:
    """Ask everything at once; answers in the order of the questions."""
    contents = list(contents)
    with ThreadPoolExecutor(len(contents)) as pool:
        return list(pool.map(ask, itertools.repeat(url), contents))


def assert_equal(
    split: Answer, reference: Answer, *, first: int | None = None, tolerance: float = TOLERANCE
) -> None:
    """Check tokens and log-probabilities.

    Args:
        split: From the instances.
        reference: From one process.
        first: Compare this many tokens only; ``None`` compares all.
        tolerance: Largest difference between log-probabilities of one token.
    """
    assert reference.tokens, "an empty answer proves nothing"
    assert split.tokens[:first] == reference.tokens[:first]
    differences = [
        abs(one - other) for one, other in zip(split.logprobs, reference.logprobs, strict=False)
    ]
    assert max(differences[:first]) <= tolerance


def assert_brought(answer: Answer, content: Sequence[Any] | str, *sources: str) -> None:
    """Check that the items of a request came from these sources, and that a text has none."""
    has_items = not isinstance(content, str) and any(part["type"] != "text" for part in content)
    assert bool(answer.items) == has_items, answer.items
    assert set(answer.sources) <= set(sources)


def assert_close(split: Answer, reference: Answer) -> None:
    """Check two answers in bfloat16, whose rounding may decide between tokens that are as likely.

    Up to the first place where the tokens differ their log-probabilities are compared; at that
    place each side must hold the other's token for as likely as its own. What follows is about
    another text.

    Args:
        split: From the instances.
        reference: From one process.
    """
    assert reference.tokens, "an empty answer proves nothing"
    places = list(zip(split.tokens, reference.tokens, strict=False))
    parted = next((index for index, (one, other) in enumerate(places) if one != other), None)
    if parted is None:
        assert split.tokens == reference.tokens
    else:
        ours, theirs = places[parted]
        for answer in (split, reference):
            likely = answer.alternatives[parted]
            assert ours in likely and theirs in likely, (ours, theirs, likely)
            assert abs(likely[ours] - likely[theirs]) <= TOLERANCE_BFLOAT16, (ours, theirs, likely)
    pairs = zip(split.logprobs[:parted], reference.logprobs[:parted], strict=True)
    assert max((abs(one - other) for one, other in pairs), default=0.0) <= TOLERANCE_BFLOAT16


def _answer(steps: list[dict[str, Any]], items: Iterable[dict[str, Any]]) -> Answer:
    return Answer(
        tokens=tuple(step["token"] for step in steps),
        logprobs=tuple(step["logprob"] for step in steps),
        alternatives=tuple(
            {each["token"]: each["logprob"] for each in step["top_logprobs"]} for step in steps
        ),
        items=tuple(items),
    )
