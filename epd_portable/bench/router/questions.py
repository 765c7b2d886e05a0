"""What is asked through the router, what the answer must be, and how an answer is judged. Pure.

A question says in its text how it is to be answered, and an answer says which question it is of: so
instances need no instructions beside the requests, and an answer that reached the wrong client, or
lacks a token, is seen.
"""

from __future__ import annotations

import base64
import functools
import math
import random
import re
import struct
import zlib
from typing import Any, Literal

import msgspec

from epd_portable.bench.pictures import png_chunk

Verdict = Literal["right", "error", "wrong", "left"]
"""``error``: a clear one, in OpenAI's form. ``left``: the client went away on purpose."""

MODEL = "demo"
_MARK = re.compile(rb"q-(\d+) (\d+) (\d+) (\d+)\.")
_HASH = re.compile(rb'"mm_hash": ?"([^"]+)"')
_PROMPT = " Say what the picture shows, or one word if there is none." * 3
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        number: Its own.
        chunks: Tokens of the answer, each an event of a stream; 0 has it in one piece.
        gap_ms: Between two of them.
        first_ms: Until the first, or until the answer that is not streamed.
    """

    number: int
    chunks: int = 0
    gap_ms: int = 0
    first_ms: int = 0

    @property
    def text(self) -> str:
        """What is asked."""
        return f"q-{self.number} {self.chunks} {self.gap_ms} {self.first_ms}.{_PROMPT}"


def find_question(body: bytes) -> Question | None:
    """Return the question that a request body holds."""
    at = body.rfind(b"q-")
    found = _MARK.match(body, at) if at >= 0 else None
    if found is None:
        found = _MARK.search(body)
    if found is None:
        return None
    number, chunks, gap_ms, first_ms = map(int, found.groups())
    return Question(number=number, chunks=chunks, gap_ms=gap_ms, first_ms=first_ms)


def find_items(body: bytes) -> list[str]:
    """Return the names of the items that a router's parameters in a body speak of."""
    return [name.decode() for name in dict.fromkeys(_HASH.findall(body))]


class NoisePicture:
    """A PNG of noise, so that it has the size it should; a new one for every number, at no cost.

    Args:
        nbytes: About its size as a file.
    """

    _VARIES_AT = len(_PNG_SIGNATURE) + 25 + 8 + 1

    def __init__(self, nbytes: int) -> None:
        side = max(1, math.isqrt(nbytes // 3))
        noise = random.Random(nbytes).randbytes(3 * side * side)
        rows = b"".join(
            b"\0" + noise[top : top + 3 * side] for top in range(0, len(noise), 3 * side)
        )
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        before = _PNG_SIGNATURE + png_chunk(b"IHDR", header) + struct.pack(">I", 9) + b"tEXtn"
        after = png_chunk(b"IDAT", zlib.compress(rows, 0)) + png_chunk(b"IEND", b"")
        # Both parts are whole groups of base64, and so is what comes between them.
        assert len(before) == self._VARIES_AT and len(before) % 3 == 0
        self._before = b"data:image/png;base64," + base64.b64encode(before)
        self._after = base64.b64encode(after)

    def url(self, number: int) -> list[bytes]:
        """Return the parts of the data URL of one picture."""
        text = b"\0%07d" % (number % 10**7)
        checked = text + struct.pack(">I", zlib.crc32(b"tEXtn" + text))
        return [self._before, base64.b64encode(checked), self._after]


def request(question: Question, host: str, picture: NoisePicture | None = None) -> list[bytes]:
    """Return an HTTP request in parts.

    Args:
        question: What is asked.
        host: For the head.
        picture: Asked about, too.
    """
    stream = "true" if question.chunks else "false"
    begin = (
        f'{{"model":"{MODEL}","max_tokens":{max(question.chunks, 1)},"temperature":0,'
        f'"stream":{stream},"messages":[{{"role":"user","content":'
    )
    text = question.text
    if picture is None:
        body = [f'{begin}"{text}"}}]}}'.encode()]
    else:
        body = [
            f'{begin}[{{"type":"image_url","image_url":{{"url":"'.encode(),
            *picture.url(question.number),
            f'"}}}},{{"type":"text","text":"{text}"}}]}}]}}'.encode(),
        ]
    length = sum(map(len, body))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"accept: */*\r\ncontent-length: {length}\r\n\r\n"
    )
    return [head.encode() + body[0], *body[1:]]


@functools.lru_cache(maxsize=8)
def _event_parts(number: int) -> tuple[bytes, bytes]:
    head = (
        f'data: {{"id":"chatcmpl-{number}","object":"chat.completion.chunk","created":1700000000,'
        f'"model":"{MODEL}","choices":[{{"index":0,"delta":{{"content":"'
    )
    return head.encode(), b' "},"logprobs":null,"finish_reason":null}]}\n\n'


def event(number: int, index: int) -> bytes:
    """Return one token of a streamed answer."""
    before, after = _event_parts(number)
    return b"%b%d%b" % (before, index, after)


LAST_EVENT = b"data: [DONE]\n\n"


def whole_answer(number: int, parameters: dict[str, Any] | None = None) -> bytes:
    """Return an answer that is not streamed."""
    answer = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1700000000,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": f"a-{number}"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
        **({"ec_transfer_params": parameters} if parameters else {}),
    }
    return msgspec.json.encode(answer)


def judge(question: Question, status: int, body: bytes) -> tuple[Verdict, str]:
    """Judge a complete answer.

    Returns:
        The verdict, and why it is not ``right``.
    """
    if status != 200:
        message = _error_message(body)
        if message is None:
            return "wrong", f"status {status} without an error in OpenAI's form: {body[:200]!r}"
        return "error", f"status {status}: {message}"
    if question.chunks:
        return _judge_stream(question, body)
    try:
        text = msgspec.json.decode(body)["choices"][0]["message"]["content"]
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        return "wrong", f"no answer ({error}): {body[:200]!r}"
    if text != f"a-{question.number}":
        return "wrong", f"another's answer: {text!r}"
    return "right", ""


def _judge_stream(question: Question, body: bytes) -> tuple[Verdict, str]:
    number = question.number
    expected = b"".join(event(number, index) for index in range(question.chunks)) + LAST_EVENT
    if body == expected:
        return "right", ""
    *events, rest = body.split(b"\n\n")
    if rest:
        return "wrong", f"ends within an event: {rest[-200:]!r}"
    failed, tokens, done = "", 0, False
    for each in events:
        if failed or done:
            if failed and each == LAST_EVENT.strip():
                continue
            return "wrong", f"something follows the end: {each[:200]!r}"
        if each == LAST_EVENT.strip():
            done = True
            continue
        data = each.removeprefix(b"data: ")
        try:
            read = msgspec.json.decode(data)
            if data is not each and isinstance(read, dict) and "error" in read:
                failed = str(read["error"]["message"])
                continue
            same = read["id"] == f"chatcmpl-{number}"
            text = read["choices"][0]["delta"]["content"]
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            return "wrong", f"not an event ({error}): {each[:200]!r}"
        if not same or text != f"{tokens} ":
            return "wrong", f"token {tokens} is another: {each[:200]!r}"
        tokens += 1
    if failed:
        return "error", f"after {tokens} tokens: {failed}"
    if not done or tokens != question.chunks:
        return "wrong", f"ends after {tokens} of {question.chunks} tokens"
    return "right", ""


def _error_message(body: bytes) -> str | None:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return None
