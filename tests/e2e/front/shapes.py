"""Request shapes: the front and plain vLLM must give equal statuses and equal bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

from epd_portable.demo.pictures import draw
from epd_portable.wire.params import FIELD
from tests.e2e.asking import AUTHORIZED, TIMEOUT_S, text
from tests.e2e.modalities.parts import frames

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, TOKENIZE, BATCH = "/v1/messages", "/tokenize", "/v1/chat/completions/batch"
ASK = text("Describe.")
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
_FIXED: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 3}

REFUSED: dict[str, dict[str, Any]] = {
    "an invalid regular expression": {"structured_outputs": {"regex": "[a-z"}},
    "an invalid grammar": {"structured_outputs": {"grammar": "root ::= ((("}},
    "a schema of an unknown type": {"structured_outputs": {"json": {"type": "nothing"}}},
    "a response format of an unknown type": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {"type": "nothing"}},
        }
    },
    "bias beyond the vocabulary": {"logit_bias": {"10000000": 1}},
    "tokens beyond the vocabulary": {"allowed_token_ids": [10**7]},
    "too many log-probabilities": {"top_logprobs": 1000, "logprobs": True},
    "min_tokens above max_tokens": {"min_tokens": 900},
    "parameters of a wrong type": {"vllm_xargs": {"kv_transfer_params": "x"}},
}
"""Settings that vLLM refuses after it has read the media, or in the engine."""

EXTRAS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "scalars for the engine": {"vllm_xargs": {"a": 1, "b": "c", "d": 0.5, "e": True}},
    "lists for the engine": {"vllm_xargs": {"a": [1, "b", 0.5], "b": []}},
    "objects for the engine": {"vllm_xargs": {"a": {"b": 1}}},
    "reserved names for the engine": {"vllm_xargs": {"ec_transfer_params": "x", "items": ["x"]}},
    "an integer of 70 bits": {"vllm_xargs": {"a": 2**70}},
    "parameters of transfers": {"kv_transfer_params": {"a": [1]}, "ec_transfer_params": {"b": 2}},
    "transfers of a client": {"ec_transfer_params": {"transfers": [{"transfer_id": "t"}]}},
    "null for all": dict.fromkeys(
        ("vllm_xargs", "kv_transfer_params", "mm_processor_kwargs", "media_io_kwargs", "stream")
    ),
    "two answers": {"n": 2, "temperature": 1.0, "seed": 1},
    "no answer": {"n": 0},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "log-probabilities of the prompt": {"prompt_logprobs": 1},
    "an echo": {"echo": True},
    "settings of the processor": {"mm_processor_kwargs": {"max_pixels": 20_000}},
    "settings of loaders": {"media_io_kwargs": {"image": {"image_mode": "RGB"}}},
    "a priority": {"priority": 5},
    "a salt": {"cache_salt": "s"},
    "an empty salt": {"cache_salt": ""},
    "a truncated prompt": {"truncate_prompt_tokens": 10},
    "a stream": {"stream": True, "stream_options": {"include_usage": True}},
    "options without a stream": {"stream_options": {"include_usage": True}},
    "tools": {"tools": [{"type": "function", "function": FUNCTION}]},
    "a required tool": {
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
    },
    "a choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "beams": {"use_beam_search": True, "n": 2},
    "an unknown field": {"foo": {"bar": 1}},
    "a name": {"request_id": "mine"},
    "another model": {"model": "other"},
    **REFUSED,
}
"""Fields of a request in addition to those that it must have."""

_NO_MEDIA = {"type": "text", "text": "Describe.", "image_url": None}
PARTS: dict[str, Any] = {
    "a URL as a string": lambda url: [{"type": "image_url", "image_url": url}, ASK],
    "a string without a type": lambda url: [{"image_url": url}, ASK],
    "an object without a type": lambda url: [{"image_url": {"url": url}}, ASK],
    "a name without a type": lambda url: [{"image_url": url, "uuid": "u1"}, ASK],
    "a type of null": lambda url: [{"type": None, "image_url": {"url": url}}, ASK],
    "a name of null": lambda url: [{**_part(url), "uuid": None}, ASK],
    "a number as a name": lambda url: [{**_part(url), "uuid": 5}, ASK],
    "no URL": lambda url: [{"type": "image_url", "image_url": None}, ASK],
    "an empty URL": lambda url: [_part(""), ASK],
    "no field": lambda url: [{"type": "image_url"}, ASK],
    "null in a text": lambda url: [_part(url), _NO_MEDIA],
    "null in a text alone": lambda url: [_NO_MEDIA],
    "text without a type": lambda url: [_part(url), {"text": "Describe."}],
    "text with a name": lambda url: [_part(url), {**ASK, "uuid": "u2"}],
    "text with a name and no type": lambda url: [_part(url), {"text": "Describe.", "uuid": "u2"}],
    "text that is null": lambda url: [_part(url), {"type": "text", "text": None}],
    "an unknown type": lambda url: [_part(url), {"type": "foo", "text": "x"}],
    "input_image": lambda url: [{"type": "input_image", "image_url": url}, ASK],
    "a wrong type": lambda url: [{"type": "video_url", "image_url": {"url": url}}, ASK],
    "embeddings": lambda url: [{"type": "image_embeds", "image_embeds": "AAAA"}, ASK],
    "strings": lambda url: ["Describe.", _part(url)],
    "an empty part": lambda url: [_part(url), {}],
    "null as a part": lambda url: [_part(url), None],
    "no parts": lambda url: [],
    "null": lambda url: None,
    "a video without a type": lambda url: [{"video_url": frames(3)["video_url"]["url"]}, ASK],
    "line breaks": lambda url: [_part(url[:60] + "\n" + url[60:]), ASK],
    "capitals": lambda url: [_part(url.replace("data:", "DATA:")), ASK],
    "a wrong media type": lambda url: [_part(url.replace("image/png", "text/plain")), ASK],
    "no image": lambda url: [_part("data:image/png;base64,AAAA"), ASK],
    "a file": lambda url: [_part("file:///etc/passwd"), ASK],
}
"""Contents of a message of chat, made from the URL of an image."""


def _part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(content: Any, **more: Any) -> dict[str, Any]:
    return {**_FIXED, "messages": [{"role": "user", "content": content}], **more}


def responses(content: Any, **more: Any) -> dict[str, Any]:
    fixed = {"model": "demo", "temperature": 0, "max_output_tokens": 3}
    return {**fixed, "input": [{"role": "user", "content": content}], **more}


def requests() -> Iterator[tuple[str, str, Any]]:
    """Yield a title, a path, and a body: an object, or bytes as they are; ``None`` to get it."""
    seeds = iter(range(4000, 5000))

    def url() -> str:
        return draw(next(seeds)).data_url()

    for title, extra in EXTRAS.items():
        yield f"chat, {title}", CHAT, chat([_part(url()), ASK], **extra)
        yield f"completions, {title}", COMPLETIONS, {**_FIXED, "prompt": ["A", "B"], **extra}
        parts = [{"type": "input_image", "image_url": url()}, {"type": "input_text", "text": "x"}]
        yield f"responses, {title}", RESPONSES, responses(parts, **extra)
        source = {"type": "base64", "media_type": "image/png", "data": url().partition(",")[2]}
        blocks = [{"type": "image", "source": source}, ASK]
        yield f"messages, {title}", MESSAGES, chat(blocks, **extra)
    for title, content in PARTS.items():
        yield f"chat of {title}", CHAT, chat(content(url()))
        yield f"tokenize {title}", TOKENIZE, chat(content(url()))
    for title, body in bodies(chat([_part(url()), text("Größe")])):
        yield f"a body of {title}", CHAT, body
    both = [[{"role": "user", "content": [_part(url()), ASK]}], [{"role": "user", "content": "x"}]]
    yield "a batch", BATCH, {**_FIXED, "messages": both}
    yield "tokens", COMPLETIONS, {**_FIXED, "prompt": [[1, 2], [3]]}
    yield "POST /health", "/health", {}
    for path in ("/v1/models", "/version", "/load", "/kv_event_sources", "/v1/nothing"):
        yield f"GET {path}", path, None


def bodies(request: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield a request as texts that vLLM accepts, and as texts that it refuses."""
    words = json.dumps(request, ensure_ascii=False)
    yield "a byte order mark", b"\xef\xbb\xbf" + words.encode()
    for encoding in ("utf-8", "utf-16", "utf-32-le", "latin-1"):
        yield encoding, words.encode(encoding)
    yield "NaN", words.replace(": 0", ": NaN", 1).encode()
    yield "one key twice", words.replace('"temp', '"model": "other", "temp').encode()
    yield "one key twice, the other way", words[:-1].encode() + b', "model": "other"}'
    yield "a string as a number", words.replace(": 3", ': "3"', 1).encode()
    yield "half of it", words[:-2].encode()
    yield "a list", b"[]"
    yield "nothing", b""


def answer(url: str, path: str, body: Any) -> tuple[int, Any]:
    """Return the status of a response, and its body without names and times."""
    sent: dict[str, Any] = {"timeout": TIMEOUT_S, "trust_env": False}
    if body is None:
        got = httpx.get(url + path, headers=AUTHORIZED, **sent)
    else:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **AUTHORIZED}
        got = httpx.post(url + path, content=content, headers=headers, **sent)
    lines = [line.removeprefix("data: ") for line in got.text.splitlines() if line[:6] == "data: "]
    if not lines:
        return got.status_code, _essence(got.text)
    # How many tokens an event has is a matter of time.
    events = [json.loads(each) for each in lines if each.startswith("{")]
    return got.status_code, sorted({_kind(each) for each in events})


def _essence(words: str) -> Any:
    """Return names of fields, types of values, and generated text."""
    try:
        read = json.loads(words)
    except ValueError:
        return words
    return _typed(read)


def _kind(event: dict[str, Any]) -> str:
    return f"{event.get('type')}: {', '.join(sorted(event.keys() - {FIELD}))}"


def _typed(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        # What became of a request's items is the front's to say.
        return {key: _typed(each, key) for key, each in value.items() if key != FIELD}
    if isinstance(value, list):
        return [_typed(each, name) for each in value]
    return value if name in ("content", "text", "count", "finish_reason") else type(value).__name__
