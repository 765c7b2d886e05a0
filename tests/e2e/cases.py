"""Requests whose answers must be those of one process."""

from __future__ import annotations

from typing import Any

from tests.e2e.asking import picture, text

ASK = text("What is in each picture?")

SINGLE: dict[str, Any] = {
    "one picture": [picture(1), ASK],
    "four pictures": [picture(2), picture(3), picture(4), picture(5), ASK],
    "one picture twice": [picture(6), picture(6), ASK],
    "text only": "hello",
    "text, picture, text, picture": [
        text("The first one:"),
        picture(7),
        text("and the second one:"),
        picture(8),
        ASK,
    ],
    "a picture of another size": [picture(9, 224), ASK],
}

REPEATED = [picture(30), ASK]
"""Asked twice: the second request finds the item in the encoder cache."""


def mixed_32() -> list[Any]:
    """Return 32 requests: text, one picture, two, and one twice, in turn."""
    requests: list[Any] = []
    for seed in range(100, 108):
        requests += [
            [picture(seed), ASK],
            f"How are you, number {seed}?",
            [picture(seed), text("and"), picture(seed + 100), ASK],
            [text("Twice:"), picture(seed + 200), picture(seed + 200), ASK],
        ]
    return requests
