"""Points of load, and the requests of a round as lines of a dataset of ``vllm bench serve``."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from epd_portable.config.problems import in_one_line
from epd_portable.errors import ConfigError

REPEATED = 8
"""Size of the set that repeated images come from."""
_WORDS = ("red", "green", "blue", "circle", "square", "star", "above", "below", "left", "right")
_SEVERAL = ("rate", "prompts", "images", "size")

Share = Annotated[float, Field(ge=0, le=1)]
Side = Annotated[int, Field(ge=28, le=4096)]
Line = dict[str, Any]
"""A line of the dataset ``custom_image``: the content of one message."""


class Point(BaseModel):
    """A load; of several numbers or sizes of images each request, or image, has one at random."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: Annotated[float, Field(gt=0, lt=1e9)] = Field(
        1.0, description="requests a second, Poisson arrivals; rate=2/6/10 is three points"
    )
    prompts: NonNegativeInt = Field(0, description="a burst of so many requests, without a rate")
    clients: NonNegativeInt = Field(
        0, description="a closed loop of so many clients, as many requests as the rate brings"
    )
    share: Share = Field(0.1, description="part of the requests that have images")
    images: tuple[PositiveInt, ...] = Field((1,), description="images of such a request")
    size: tuple[Side, ...] = Field((448,), description="side of an image in pixels")
    repeat: Share = Field(0.0, description=f"part of the images from a set of {REPEATED}")
    text: PositiveInt = Field(400, description="words of a prompt")
    output: PositiveInt = Field(150, description="tokens of a response")

    @property
    def key(self) -> str:
        """Name: the keys that were set, as typed."""
        values = self.model_dump(exclude_unset=True)
        return ",".join(f"{name}={_typed(value)}" for name, value in values.items())

    def lines(self, seconds: float, number: int) -> list[Line]:
        """Return the requests of a round: equal for every side, and in no other round.

        The share of requests with images is exact.
        """
        count = self.prompts or max(1, round(self.rate * seconds))
        draw = random.Random(f"{self.key} {number}")
        chosen = set(draw.sample(range(count), round(self.share * count)))
        return [self._line(draw, with_images=index in chosen) for index in range(count)]

    def _line(self, draw: random.Random, *, with_images: bool) -> Line:
        parts = []
        for _ in range(draw.choice(self.images) if with_images else 0):
            seed = draw.randrange(REPEATED) if draw.random() < self.repeat else draw.random()
            data = base64.b64encode(_noise(draw.choice(self.size), seed)).decode()
            url = f"data:image/jpeg;base64,{data}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        text = " ".join([f"{draw.random()}", *draw.choices(_WORDS, k=self.text)])
        return {"content": [*parts, {"type": "text", "text": text}]}


def has_images(line: Line) -> bool:
    """Return whether a request has images."""
    return any(part["type"] != "text" for part in line["content"])


def _noise(size: int, seed: float) -> bytes:
    """Return noise as JPEG, like `random-mm` of ``vllm bench serve``: the bytes of a rich photo."""
    from PIL import Image  # In an environment with an engine only.

    file = io.BytesIO()
    pixels = random.Random(seed).randbytes(3 * size * size)
    Image.frombytes("RGB", (size, size), pixels).save(file, format="JPEG")
    return file.getvalue()


def _typed(value: Any) -> str:
    return "/".join(map(_typed, value)) if isinstance(value, tuple) else f"{value:g}"


def read_points(texts: Sequence[str]) -> tuple[Point, ...]:
    """Read each ``KEY=VALUE,...``; a key that one leaves out is as in the one before it.

    Raises:
        ConfigError: A key or value is invalid, or a point is duplicate.
    """
    found: list[Point] = []
    values: dict[str, Any] = {}
    for text in texts:
        for part in text.split(","):
            key, _, value = part.partition("=")
            if key not in Point.model_fields:
                known = ", ".join(Point.model_fields)
                raise ConfigError(f"--point {text}: unknown key {key!r}; known are {known}")
            values[key] = value.split("/") if key in _SEVERAL else value
        axis = "prompts" if "prompts" in values else "rate"
        for value in values.get(axis, ["1"]):
            try:
                point = Point(**{**values, axis: value})
            except ValidationError as error:
                raise ConfigError(f"--point {text}: {in_one_line(error)}") from error
            if point in found:
                raise ConfigError(f"--point {text}: {point.key} is duplicate; remove one")
            found.append(point)
    return tuple(found)


def describe_keys() -> str:
    """Return a line of ``--help`` for each key."""
    return "\n".join(
        f"  {name:<9} {field.description}"
        + (f" [default: {_typed(field.default)}]" if field.default else "")
        for name, field in Point.model_fields.items()
    )
