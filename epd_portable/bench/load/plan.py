"""What is asked: points of load, and the requests of their rounds. Pure."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt

from epd_portable.bench.mix import Mix, Share, as_typed, checked_mix, read_keys
from epd_portable.errors import ConfigError

REPEATED = 8
"""Size of the set that repeated pictures come from."""
_SEVERAL = ("rate", "prompts", "pictures", "size")
_ROW = '{"prompt": "…", "images": ["…"]}'


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPicture:
    """A picture of a request.

    Attributes:
        seed: Decides the content: two pictures are equal if their seeds and sizes are.
        size: Side in pixels; 0 for the file that the seed names.
        frames: Of a video in place of a picture; 0 for a picture.
    """

    seed: str
    size: int
    frames: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """One request.

    Attributes:
        at_s: When it is sent, from the beginning of the round.
        text: The text; what it is made from by chance where it is to have `text_tokens`.
        text_tokens: Length of a text that is made up; 0 where it is not.
        pictures: In front of the text.
    """

    at_s: float
    text: str
    text_tokens: int
    output_tokens: int
    pictures: tuple[LoadPicture, ...] = ()

    @property
    def kind(self) -> str:
        """``text`` or ``pictures``: how figures are grouped."""
        return "pictures" if self.pictures else "text"


class LoadPoint(Mix):
    """One load."""

    rate: Annotated[float, Field(gt=0, lt=1e9)] = Field(
        1.0,
        description="requests a second, by Poisson arrivals; rate=2/6/10 is three points",
    )
    frames: NonNegativeInt = Field(0, description="a video of so many frames for each picture")
    repeat: Share = Field(
        0.0, description=f"part of the pictures that come from a set of {REPEATED}"
    )
    clients: NonNegativeInt = Field(
        0,
        description="a closed loop: so many ask, each once it has its answer, as often in all as "
        "the rate brings",
    )
    prompts: NonNegativeInt = Field(
        0,
        description="so many requests at once, whatever the rate; prompts=100/1000 is two points",
    )
    file: str = Field(
        "",
        description='lines of {"prompt": "…", "images": ["a.jpg"]}, paths beside the file, in '
        "place of made-up requests; none is asked twice",
    )

    @property
    def key(self) -> str:
        """Its name: the keys that were set, as they are typed."""
        return as_typed(self.model_dump(exclude_unset=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """A whole measurement.

    Attributes:
        points: Loads, each measured on all sides.
        seconds: Window of arrivals of a point in a round.
        rounds: Of each point.
        ttft_s: Limit of TTFT for goodput; infinite for none.
        tpot_s: Limit of TPOT for goodput; infinite for none.
    """

    points: tuple[LoadPoint, ...]
    seconds: float
    rounds: int
    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def requests(self, point: LoadPoint, number: int) -> tuple[LoadRequest, ...]:
        """Return the requests of a round, the same for every side and in no other round.

        The share of requests with pictures is exact: a share that is left to chance would differ
        between rounds.
        """
        seed = f"{point.key} {number}"
        draw = random.Random(seed)
        times = [0.0] * point.prompts
        now_s = draw.expovariate(point.rate)
        while now_s < self.seconds and not point.prompts:
            times.append(now_s)
            now_s += draw.expovariate(point.rate)
        if point.file:
            return tuple(
                LoadRequest(
                    at_s=at_s,
                    text=row["prompt"],
                    text_tokens=0,
                    output_tokens=point.output,
                    pictures=tuple(LoadPicture(seed=each, size=0) for each in row["images"]),
                )
                for at_s, row in zip(times, self._rows(point, number), strict=True)
            )
        chosen = set(draw.sample(range(len(times)), round(point.share * len(times))))
        return tuple(
            LoadRequest(
                at_s=at_s,
                text=f"{seed} {index}",
                text_tokens=point.text,
                output_tokens=point.output,
                pictures=_pictures(point, draw, f"{seed} {index}") if index in chosen else (),
            )
            for index, at_s in enumerate(times)
        )

    def _rows(self, point: LoadPoint, number: int) -> list[dict[str, Any]]:
        """Return those of a point's file for a round, which no other round or point gets."""
        sharing = [each for each in self.points if each.file == point.file]
        before = sum(each.prompts for each in sharing[: sharing.index(point)])
        begin = number * sum(each.prompts for each in sharing) + before
        path = Path(point.file).resolve()  # The clients run in another folder.
        try:
            found = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            found = found[begin : begin + point.prompts]
            rows = [
                {
                    "prompt": str(each["prompt"]),
                    "images": [str(path.parent / i) for i in each["images"]],
                }
                for each in found
            ]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{path}: {error!r}: expected {_ROW} in every line") from error
        if len(rows) < point.prompts:
            raise ConfigError(
                f"{path}: {point.key}, round {number + 1} asks for lines {begin + 1} to "
                f"{begin + point.prompts}, and none is asked twice: add lines, or lower prompts or "
                "--rounds"
            )
        return rows


def _pictures(point: LoadPoint, draw: random.Random, seed: str) -> tuple[LoadPicture, ...]:
    found = []
    for place in range(draw.choice(point.pictures)):
        repeated = draw.random() < point.repeat
        content = f"repeated {draw.randrange(REPEATED)}" if repeated else f"{seed} {place}"
        size = draw.choice(point.size)
        found.append(LoadPicture(seed=content, size=size, frames=point.frames))
    return tuple(found)


def read_points(texts: Sequence[str]) -> tuple[LoadPoint, ...]:
    """Read each ``KEY=VALUE,...``; what one leaves out is as in the one before it.

    Raises:
        ConfigError: A key or value is none, no rate is given, or a point is there twice.
    """
    found: list[LoadPoint] = []
    values: dict[str, Any] = {}
    for text in texts:
        values |= read_keys("--point", text, LoadPoint, several=_SEVERAL)
        axis = "prompts" if "prompts" in values else "rate"
        if axis not in values:
            raise ConfigError(
                f"--point {text}: say how often to ask, as in rate=2/6/10, or how many, as in "
                "prompts=100/1000"
            )
        if values.get("file") and axis == "rate":
            raise ConfigError(f"--point {text}: say how many to ask of the file by prompts=")
        for value in values[axis]:
            point = checked_mix("--point", text, LoadPoint, values | {axis: value})
            if point in found:
                raise ConfigError(f"--point {text}: {point.key} is there twice")
            found.append(point)
    return tuple(found)
