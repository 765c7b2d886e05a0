"""What `serve` asks: kinds of requests, and the requests themselves. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from epd_portable.bench.pictures import data_url

_WORDS = ("red", "green", "blue", "circle", "square", "star", "above", "below", "left", "right")
_PROMPT_WORDS = 48
BUSY_TOKENS_FACTOR = 4
"""Texts beside pictures have answers this many times longer, so as to last while they encode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestKind:
    """One kind of request.

    Attributes:
        name: For tables.
        images: Pictures in each measured request.
        size: Their side in pixels.
        beside: Pictures in each of the unmeasured requests that are sent at the same moment.
    """

    name: str
    images: int = 0
    size: int = 0
    beside: int = 0


def kinds(images: Sequence[int], sizes: Sequence[int]) -> list[RequestKind]:
    """Return text, every combination of pictures, and text while the most pictures are encoded.

    Args:
        images: Numbers of pictures in a request, positive; may be empty.
        sizes: Sides in pixels.
    """
    found = [RequestKind(name="text")]
    for count in dict.fromkeys(images):
        for size in dict.fromkeys(sizes):
            noun = "picture" if count == 1 else "pictures"
            found.append(RequestKind(name=f"{count} {noun}, {size} px", images=count, size=size))
    if images and sizes:
        most, largest = max(images), max(sizes)
        name = f"text beside {most} × {largest} px"
        found.append(RequestKind(name=name, size=largest, beside=most))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Requests that are sent at the same moment; bodies without a model.

    Attributes:
        measured: Of the kind.
        beside: Load that is not measured.
        pictures: Pictures in all of them.
    """

    measured: tuple[dict[str, Any], ...]
    beside: tuple[dict[str, Any], ...]
    pictures: int


def rounds(kind: RequestKind, *, concurrency: int, max_tokens: int, seeds: Iterator[int]) -> Round:
    """Return one round: ``concurrency`` requests that differ from all others.

    Args:
        kind: What is asked.
        concurrency: Measured requests; as many unmeasured ones if the kind has such.
        max_tokens: Tokens of each answer.
        seeds: A different number for each picture and text.
    """
    tokens = max_tokens * BUSY_TOKENS_FACTOR if kind.beside else max_tokens
    measured = [_body(kind.images, kind.size, tokens, seeds) for _ in range(concurrency)]
    beside = [
        _body(kind.beside, kind.size, max_tokens, seeds)
        for _ in range(concurrency if kind.beside else 0)
    ]
    return Round(
        measured=tuple(measured),
        beside=tuple(beside),
        pictures=concurrency * (kind.images + kind.beside),
    )


def _body(images: int, size: int, max_tokens: int, seeds: Iterator[int]) -> dict[str, Any]:
    words = random.Random(next(seeds)).choices(_WORDS, k=_PROMPT_WORDS)
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(next(seeds), size)}}
        for _ in range(images)
    ]
    content.append({"type": "text", "text": " ".join(words)})
    return {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": max_tokens,
        # Answers of one length, and every token with a text by which it is seen to arrive.
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
