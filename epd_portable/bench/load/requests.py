"""What is asked: mixes of texts and pictures, and recorded traffic. Pure."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from epd_portable.bench.load.commands import Ask, PictureSpec
from epd_portable.bench.load.schedule import seed_of
from epd_portable.errors import ConfigError

PictureFormat = Literal["png", "jpeg"]
REPEATED = 8
"""Size of the small set that repeated pictures come from."""
AT_ONCE = 16
"""Conversations whose turns are asked in rotation: a turn comes so many requests after the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """What a point of the measurement asks.

    Attributes:
        share: Of the requests that have pictures, 0 to 1.
        pictures: How many such a request has; one of these at random.
        sizes: Sides in pixels; one of these at random for each picture.
        text_tokens: Length of the text of a request, about.
        output_tokens: Length of an answer, exactly.
        repeat: Share of the pictures that come from a set of `REPEATED`.
        format: Of the pictures.
        turns: Of a conversation, each sent with all before it; 1 for requests that have nothing to
            do with each other.
    """

    share: float = 0.1
    pictures: tuple[int, ...] = (1,)
    sizes: tuple[int, ...] = (448,)
    text_tokens: int = 400
    output_tokens: int = 150
    repeat: float = 0.0
    format: PictureFormat = "jpeg"
    turns: int = 1

    @property
    def about(self) -> str:
        """The pictures, for tables."""
        turns = f", {self.turns} turns" if self.turns > 1 else ""
        if not self.share:
            return f"text only{turns}"
        numbers = "/".join(map(str, self.pictures))
        sides = "/".join(map(str, self.sizes))
        again = f", {self.repeat:.0%} repeated" if self.repeat else ""
        return f"{self.share:.0%} × {numbers} × {sides} px{again}{turns}"


class Recorded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of recorded traffic.

    Attributes:
        time_s: When it arrived, from any beginning.
        text_tokens: Length of its text.
        output_tokens: Length of its answer.
        sizes: Side of each of its pictures in pixels.
        seeds: Content of each of its pictures: the same number is the same picture. Without, all
            differ.
    """

    time_s: float
    text_tokens: int
    output_tokens: int
    sizes: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()


def read_trace(path: Path) -> tuple[Recorded, ...]:
    """Read recorded traffic, one JSON object a line, in the order of time.

    Raises:
        ConfigError: The file cannot be read, or a line is not of this form; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--replay {path}: {error.strerror or error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            each = msgspec.json.decode(line, type=Recorded)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--replay {path}, line {number}: {error}") from error
        if each.text_tokens < 1 or each.output_tokens < 1:
            raise ConfigError(f"--replay {path}, line {number}: lengths must be positive")
        if each.seeds and len(each.seeds) != len(each.sizes):
            raise ConfigError(f"--replay {path}, line {number}: one seed for each size, or none")
        found.append(each)
    if not found:
        raise ConfigError(f"--replay {path}: there is no request in it")
    return tuple(sorted(found, key=lambda each: each.time_s))


def asks_of_mix(
    mix: Mix, times: Sequence[float], *, seed: int, set_seed: int, words_per_token: float
) -> tuple[Ask, ...]:
    """Return a request for each time; all texts differ, and all pictures but the repeated ones.

    Of conversations `AT_ONCE` go on at a time, each with a turn in every so many requests: the
    answer to the turn before has most likely come. The last ones may be without their end.

    Args:
        mix: What is asked.
        times: When, see `epd_portable.bench.load.schedule.arrivals`.
        seed: Decides everything that is random.
        set_seed: Decides the set of the repeated pictures.
        words_per_token: Words of `epd_portable.bench.load.bodies.WORDS` that make a token.
    """
    if mix.turns > 1:
        return _conversations(
            mix, times, seed=seed, set_seed=set_seed, words_per_token=words_per_token
        )
    draw = random.Random(seed)
    # Exactly the share: a count that is left to chance would differ between rounds.
    with_pictures = set(draw.sample(range(len(times)), round(mix.share * len(times))))
    found = []
    for index, at_s in enumerate(times):
        count = draw.choice(mix.pictures) if index in with_pictures else 0
        pictures = []
        for place in range(count):
            repeated = draw.random() < mix.repeat
            size = draw.choice(mix.sizes)
            content = seed_of(seed, index, place)
            if repeated:
                content = seed_of(set_seed, draw.randrange(REPEATED))
            pictures.append(PictureSpec(seed=content, size=size, format=mix.format))
        found.append(
            Ask(
                at_s=at_s,
                seed=seed_of(seed, index),
                words=max(1, round(mix.text_tokens * words_per_token)),
                output_tokens=mix.output_tokens,
                pictures=tuple(pictures),
            )
        )
    return tuple(found)


def _conversations(
    mix: Mix, times: Sequence[float], *, seed: int, set_seed: int, words_per_token: float
) -> tuple[Ask, ...]:
    """Return the turns of conversations; a conversation begins as a request of its own does."""
    together = AT_ONCE * mix.turns
    count = AT_ONCE * -(-len(times) // together)
    begun = asks_of_mix(
        dataclasses.replace(mix, turns=1),
        (0.0,) * count,
        seed=seed,
        set_seed=set_seed,
        words_per_token=words_per_token,
    )
    found = []
    for index, at_s in enumerate(times):
        group, place = divmod(index, together)
        turn, number = divmod(place, AT_ONCE)
        first = begun[group * AT_ONCE + number]
        texts = (first.seed, *(seed_of(first.seed, "turn", later) for later in range(1, turn + 1)))
        found.append(msgspec.structs.replace(first, at_s=at_s, seed=texts[-1], history=texts[:-1]))
    return tuple(found)


def asks_of_trace(
    trace: Sequence[Recorded],
    *,
    seed: int,
    format: PictureFormat,
    words_per_token: float,
) -> tuple[Ask, ...]:
    """Return the requests of recorded traffic, as fast as it was."""
    begin_s = trace[0].time_s
    return tuple(
        Ask(
            at_s=each.time_s - begin_s,
            seed=seed_of(seed, index),
            words=max(1, round(each.text_tokens * words_per_token)),
            output_tokens=each.output_tokens,
            pictures=tuple(
                PictureSpec(
                    seed=seed_of(seed, "named", each.seeds[place])
                    if each.seeds
                    else seed_of(seed, index, place),
                    size=size,
                    format=format,
                )
                for place, size in enumerate(each.sizes)
            ),
        )
        for index, each in enumerate(trace)
    )
