"""Draws of a seed before the first event: sizes, platform, peers, prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tests.kit.sizes import PLACEHOLDER, Prompt, Sizes, Wish

WAIT_TIMEOUT_S = 30.0
TOO_LARGE = "too large"
"""An item that the instance cannot hold, or cannot receive."""


@dataclass(frozen=True, kw_only=True)
class Shape(Sizes):
    """The instance and its peers.

    Attributes:
        paths: Between the instance and each encoder.
        faults: Anything may fail.
        flaws: Peers fail, and report each failure: no wait needs a deadline. With neither all goes
            well.
        lost: Part of the messages that are lost.
        known_gone: The instance can see that an encoder's process has ended.
        store: There is one.
        parts: Items that are parts of one video: each prompt has all of them, side by side.
    """

    paths: tuple[str, ...]
    faults: bool
    flaws: bool
    lost: float
    known_gone: bool
    store: bool
    requests: int
    long_answers: bool
    parts: tuple[str, ...] = ()


Segment = str | list[int]
"""An item's name, or tokens of text. The first part of a video stands for all."""


class Prompts:
    """Prompts that begin alike: turns of a few conversations, and what branches off."""

    def __init__(self, rng: Random, shape: Shape, longest: int) -> None:
        self._rng, self._shape, self._longest = rng, shape, longest
        self._token = 1000
        self._scripts = [self._script() for _ in range(rng.randint(1, 4))]

    def next(self) -> Prompt:
        rng, shape = self._rng, self._shape
        script = rng.choice(self._scripts)
        segments = script[: rng.randint(1, len(script))]
        if rng.random() < 0.25:
            segments = [*segments, *self._script()[: rng.randint(1, 3)]]
        if rng.random() < 0.8 or isinstance(segments[-1], str):
            segments = [*segments, self._text(1, 4)]
        first = shape.parts[:1]
        segments = [each for one in segments for each in (shape.parts if one in first else (one,))]
        tokens: list[int] = []
        places: list[tuple[str, int, int]] = []
        # A drafter wants items that are near each other at once, which may be too much.
        gap = 2 * shape.lookahead + 1 if shape.lookahead else 0
        for segment in segments:
            if isinstance(segment, str):
                missing = gap - (len(tokens) - sum(places[-1][1:])) if places else 0
                tokens += [1] * missing
                size = shape.items[segment]
                if len(tokens) + size + 2 > self._longest:
                    continue
                places.append((segment, len(tokens), size))
                tokens += [PLACEHOLDER] * size
            elif len(tokens) + len(segment) + 1 <= self._longest:
                tokens += segment
        if not tokens or tokens[-1] == PLACEHOLDER:
            tokens += self._text(1, 1)
        return Prompt(
            tokens=tokens,
            places=places,
            wishes={name: self._wish() for name in dict.fromkeys(p[0] for p in places)},
            answer=self._answer(),
            priority=rng.randint(0, 2) if shape.policy == "priority" else 0,
        )

    def _answer(self) -> int:
        rng = self._rng
        if self._shape.long_answers and rng.random() < 0.3:
            return rng.choice([100, 300, 500])
        return rng.choice([1, 1, 2, 3, 6, 12])

    def _wish(self) -> Wish:
        rng = self._rng
        if not self._shape.can_encode:
            stored = self._shape.store and rng.random() < 0.4
            return Wish(moved=True, media=rng.random() < 0.5, stored=stored)
        if self._shape.store and rng.random() < 0.4:
            return Wish(moved=True, media=rng.random() < 0.5, stored=True)
        return rng.choice(
            [
                Wish(moved=True, media=True),
                Wish(moved=True, media=True),
                Wish(moved=True, media=False),
                Wish(moved=False, media=True),
            ]
        )

    def _script(self) -> list[Segment]:
        rng = self._rng
        names = [name for name in self._shape.items if name not in self._shape.parts[1:]]
        segments: list[Segment] = [self._text(0, 9)]
        for _ in range(rng.randint(0, 5)):
            before = [each for each in segments if isinstance(each, str)]
            segments.append(
                rng.choice(before) if before and rng.random() < 0.3 else rng.choice(names)
            )
            segments.append(self._text(0, rng.choice([0, 1, 7])))
        return segments

    def _text(self, least: int, most: int) -> list[int]:
        count = self._rng.randint(least, most)
        self._token += count
        return list(range(self._token - count, self._token))


def draw(rng: Random) -> Shape:
    """Return an instance that is small in most of what can be short."""
    copies = rng.random() < 0.4
    beside = not copies and rng.random() < 0.6
    can_encode = rng.random() < 0.75
    faults = rng.random() < 0.5
    largest = rng.randint(2, 12)
    items = {name: rng.randint(1, largest) for name in "abcdefgh"[: rng.randint(2, 8)]}
    parts = tuple(f"v#{number}-{number + 1}" for number in range(rng.choice([0, 0, 0, 2, 3])))
    items |= {name: rng.randint(1, largest) for name in parts}
    largest = max(items.values())
    lookahead = rng.choice([0, 0, 0, 0, 1, 2])
    block = rng.choice([2, 4, 4, 8, 16])
    tokens = rng.choice([3, 5, 8, 16, 16, 64, 64])
    whole = rng.random() < 0.15 and tokens >= largest + 2 * lookahead
    long_answers = rng.random() < 0.25
    longest = 12 + 5 * largest
    need = -(-(longest + (500 if long_answers else 12) + 4 + 2 * lookahead) // block) + 2
    shape = Shape(
        copies=copies,
        beside=beside,
        can_encode=can_encode,
        # No CPU schedules ahead, and only there items are encoded beside steps.
        ahead=not beside and rng.random() < 0.6,
        policy=rng.choice(["fcfs", "fcfs", "fcfs", "priority"]),
        block=block,
        blocks=need * rng.choice([1, 1, 2, 4]) + rng.randint(0, 4),
        seats=rng.randint(1, 5),
        tokens=max(tokens, 4 * lookahead + 2),
        encoder_tokens=rng.choice([largest, 2 * largest, 100]),
        whole_items=whole,
        reserves_all=rng.random() < 0.5,
        prefix_caching=rng.random() < 0.8,
        lookahead=lookahead,
        min_start_tokens=rng.choice([0, 4, 12, 256]),
        cache=rng.choice([largest, largest + rng.randint(0, largest), 3 * largest, 8 * largest]),
        pool=rng.choice([largest, largest + rng.randint(0, largest), 3 * largest, 8 * largest]),
        items=items,
        paths=tuple(
            rng.choice(["shm", "shm", "tcp", "collective"]) for _ in range(rng.randint(1, 3))
        ),
        faults=faults,
        flaws=not faults and rng.random() < 0.5,
        wait_timeout_s=WAIT_TIMEOUT_S if faults else 100 * WAIT_TIMEOUT_S,
        lost=rng.choice([0.0, 0.0, 0.05, 0.3]) if faults else 0.0,
        known_gone=rng.random() < 0.5,
        requests=rng.randint(2, 14),
        long_answers=long_answers,
        store=rng.random() < 0.3,
        parts=parts,
    )
    if rng.random() < 0.2:
        # Nothing excuses a refusal: only room for the items is short, which transfers alone bring.
        shape = replace(
            shape,
            beside=False,
            can_encode=False,
            blocks=need * 8,
            seats=max(shape.seats, 3),
            whole_items=False,
            prefix_caching=False,
            cache=largest,
            pool=largest * (1 if copies else 2),
            faults=False,
            flaws=False,
            wait_timeout_s=100 * WAIT_TIMEOUT_S,
            lost=0.0,
        )
    if shape.policy == "priority" and shape.can_encode:
        # vLLM preempts requests then that it has scheduled in the same step, does not encode their
        # items after all, and lets others compute with these (0.32): nobody is preempted here.
        shape = replace(shape, blocks=shape.seats * need + shape.blocks)
    beyond = rng.choice([shape.cache, shape.pool]) + 1
    if rng.random() < 0.15 and not shape.whole_items and beyond + 2 <= longest_prompt(shape):
        shape = replace(shape, items={**items, TOO_LARGE: beyond})
    return shape


def longest_prompt(shape: Shape) -> int:
    """Return how many tokens a prompt may have."""
    return 12 + 5 * max(size for name, size in shape.items.items() if name != TOO_LARGE)
