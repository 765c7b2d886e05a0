"""Sizes of a prefill+decode side, and its requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PLACEHOLDER = 7
"""Token in the place of an item."""
MAX_MODEL_LEN = 1024


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The instance.

    Attributes:
        copies: Workers copy items out of their slots, as on devices.
        beside: The instance encodes in the background, between its steps.
        ahead: A step is scheduled before the output of the one before it is there.
        lookahead: Tokens that a drafter reads ahead.
        second: Steps are for vLLM's second model runner.
        stats: Steps put out statistics for API servers.
        cache: Embeddings that the encoder cache holds.
        pool: Embeddings that the receive pool holds.
        items: Embeddings of each item, by name.
    """

    items: dict[str, int]
    cache: int
    pool: int
    copies: bool = False
    beside: bool = False
    can_encode: bool = True
    ahead: bool = False
    policy: Literal["fcfs", "priority"] = "fcfs"
    block: int = 4
    blocks: int = 64
    seats: int = 4
    tokens: int = 64
    encoder_tokens: int = 100
    whole_items: bool = False
    reserves_all: bool = True
    prefix_caching: bool = True
    lookahead: int = 0
    min_start_tokens: int = 0
    second: bool = False
    stats: bool = False
    wait_timeout_s: float = 30.0
    lease_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Form in which a request has one item.

    Attributes:
        moved: By a transfer of its own.
        media: The request holds the item's media.
        stored: The store is to bring it; see ``moved``.
    """

    moved: bool
    media: bool
    stored: bool = False


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Tokens, items and length of the answer of one request.

    Attributes:
        places: ``(name, offset, length)`` of its items, which may come more than once.
        wishes: By name.
    """

    tokens: list[int]
    places: list[tuple[str, int, int]]
    wishes: dict[str, Wish]
    answer: int
    priority: int = 0

    @property
    def size(self) -> int:
        return len(self.tokens) + self.answer

    def bare(self, can_encode: bool) -> set[str]:
        """Return the items that the instance cannot encode for this request."""
        return {name for name, wish in self.wishes.items() if not (can_encode and wish.media)}
