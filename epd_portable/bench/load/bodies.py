"""The bodies of requests: texts and pictures that differ for every seed."""

from __future__ import annotations

import base64
import io
import json
import random

from epd_portable.bench import pictures
from epd_portable.bench.load.commands import Ask, PictureSpec
from epd_portable.bench.load.schedule import seed_of

WORDS = ("red", "green", "blue", "circle", "square", "star", "above", "below", "left", "right")
CHAT_PATH = "/v1/chat/completions"


def text_of(seed: int, words: int) -> str:
    """Return a text of so many words."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def picture_url(picture: PictureSpec) -> str:
    """Return a picture as a data URL: blocks of colour as PNG, noise as JPEG.

    Noise is what ``vllm bench serve`` sends as `random-mm`; it has the size in bytes of a
    photograph with much detail.
    """
    if picture.format == "png":
        return pictures.data_url(picture.seed, picture.size)
    # With an engine's environment only; what sends PNG does without.
    from PIL import Image

    side = picture.size
    noise = random.Random(picture.seed).randbytes(3 * side * side)
    file = io.BytesIO()
    Image.frombytes("RGB", (side, side), noise).save(file, format="JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def body_of(ask: Ask) -> bytes:
    """Return a streamed chat request without the name of a model, and without the first brace."""
    content: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": picture_url(each)}} for each in ask.pictures
    ]
    messages: list[dict[str, object]] = []
    for seed in (*ask.history, ask.seed):
        content.append({"type": "text", "text": text_of(seed, ask.words)})
        messages.append({"role": "user", "content": content})
        # What a side had answered would differ between sides.
        answer = text_of(seed_of(seed, "answer"), ask.output_tokens)
        messages.append({"role": "assistant", "content": answer})
        content = []
    body = {
        "messages": messages[:-1],
        "temperature": 0,
        "max_tokens": ask.output_tokens,
        # Answers of one length, and every token with a text by which it is seen to arrive.
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body, separators=(",", ":")).encode()[1:]


def request_parts(body: bytes, *, model: str, host: str, request_id: str) -> list[bytes]:
    """Return an HTTP request as the pieces that are written.

    Args:
        body: From `body_of`.
        model: Name of the model.
        host: Of the server, with its port.
        request_id: By which its processes name it.
    """
    begin = b'{"model":' + json.dumps(model).encode() + b","
    head = (
        f"POST {CHAT_PATH} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"x-request-id: {request_id}\r\ncontent-length: {len(begin) + len(body)}\r\n\r\n"
    )
    return [head.encode() + begin, body]
