"""The bodies of requests: texts, pictures and videos that differ for every seed."""

from __future__ import annotations

import base64
import io
import json
import mimetypes
import random
from pathlib import Path

from epd_portable.bench.load.plan import LoadPicture, LoadRequest

WORDS = ("red", "green", "blue", "circle", "square", "star", "above", "below", "left", "right")


def text_of(seed: str, words: int) -> str:
    """Return a text of so many words; of 0 the seed itself."""
    if not words:
        return seed
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def part_of(picture: LoadPicture) -> dict[str, object]:
    """Return a picture, or a video, as a part of a message: its file, or noise as JPEG.

    `random-mm` of ``vllm bench serve`` sends such noise; it has as many bytes as a photograph with
    much detail. A video is its frames as vLLM takes them, which needs no encoder of videos.
    """
    if not picture.size:
        kind, _ = mimetypes.guess_type(picture.seed)
        content = _base64(Path(picture.seed).read_bytes())
        return _url("image_url", f"data:{kind or 'image/jpeg'};base64,{content}")
    if not picture.frames:
        return _url("image_url", f"data:image/jpeg;base64,{_noise(picture.seed, picture.size)}")
    frames = (_noise(f"{picture.seed} {n}", picture.size) for n in range(picture.frames))
    return _url("video_url", f"data:video/jpeg;base64,{','.join(frames)}")


def _url(kind: str, url: str) -> dict[str, object]:
    return {"type": kind, kind: {"url": url}}


def _noise(seed: str, side: int) -> str:
    # With an engine's environment only, as the engines that read it.
    from PIL import Image

    noise = random.Random(seed).randbytes(3 * side * side)
    file = io.BytesIO()
    Image.frombytes("RGB", (side, side), noise).save(file, format="JPEG")
    return _base64(file.getvalue())


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def body_of(request: LoadRequest, model: str) -> bytes:
    """Return a streamed chat request."""
    content = [part_of(each) for each in request.pictures]
    messages: list[dict[str, object]] = []
    for seed in request.texts:
        content.append({"type": "text", "text": text_of(seed, request.words)})
        messages.append({"role": "user", "content": content})
        # What a side had answered would differ between sides.
        answer = text_of(f"{seed} answer", request.output_tokens)
        messages.append({"role": "assistant", "content": answer})
        content = []
    body = {
        "model": model,
        "messages": messages[:-1],
        "temperature": 0,
        "max_tokens": request.output_tokens,
        # Answers of one length, and every token with a text by which it is seen to arrive.
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body, separators=(",", ":")).encode()
