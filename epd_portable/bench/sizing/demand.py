"""What clients ask for: a mix of requests, and when each of them comes."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from epd_portable.bench.sizing.requests import PictureItem, SimulatedRequest
from epd_portable.bench.sizing.stages import StageTimes
from epd_portable.config.problems import in_one_line
from epd_portable.errors import ConfigError

Choices = Annotated[tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...], Field(min_length=1)]


class Demand(BaseModel):
    """A mix of requests. Where several values stand, each request draws one of them.

    Attributes:
        share: Of requests that have pictures.
        pictures: Pictures of such a request.
        size: Side of a picture in pixels.
        text: Prompt tokens beside pictures.
        output: Tokens of an answer.
        picture_bytes: Of a picture's file, for the router.
        burst: Squared coefficient of variation of the time between requests: 1 is a Poisson
            process, 4 comes in bursts, near 0 is a metronome.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: Annotated[float, Field(ge=0, le=1)] = 0.1
    pictures: Choices = (1,)
    size: Choices = (448,)
    text: Choices = (64,)
    output: Choices = (60,)
    picture_bytes: Annotated[int, Field(ge=1)] = 100_000
    burst: Annotated[float, Field(gt=0, le=100)] = 1.0

    def __str__(self) -> str:
        """Return it as `read_demand` reads it."""
        return ",".join(
            f"{name}={'+'.join(map(str, value)) if isinstance(value, tuple) else f'{value:g}'}"
            for name, value in self.model_dump().items()
        )

    def requests(
        self, times: StageTimes, *, rate: float, count: int, seed: int
    ) -> list[SimulatedRequest]:
        """Return requests in the order of arrival.

        The same seed gives the same requests at every rate, closer together or farther apart.

        Args:
            times: Tell how many embeddings a picture has.
            rate: Requests a second, positive.
            count: How many.
            seed: Decides everything that is drawn.
        """
        draw = np.random.default_rng(seed)
        gaps = draw.gamma(1 / self.burst, self.burst, count)
        arrivals = (np.cumsum(gaps) / rate).tolist()
        has_pictures = (draw.random(count) < self.share).tolist()
        pictures = draw.choice(self.pictures, count).tolist()
        sizes = draw.choice(self.size, count).tolist()
        texts = draw.choice(self.text, count).tolist()
        outputs = draw.choice(self.output, count).tolist()
        found = []
        for index, arrival_s in enumerate(arrivals):
            pixels = sizes[index] ** 2
            items = [
                PictureItem(
                    pixels=pixels,
                    embeddings=times.encode.embeddings(pixels),
                    nbytes=self.picture_bytes,
                )
                for _ in range(pictures[index] if has_pictures[index] else 0)
            ]
            found.append(
                SimulatedRequest(
                    arrival_s=arrival_s,
                    text_tokens=texts[index],
                    output_tokens=outputs[index],
                    items=items,
                )
            )
        return found


def read_demand(text: str) -> Demand:
    """Read a mix as the command line writes it: ``share=0.1,pictures=1+4,size=448``.

    Raises:
        ConfigError: A key is unknown or its value out of range.
    """
    values: dict[str, object] = {}
    known = ", ".join(Demand.model_fields)
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or name not in Demand.model_fields:
            raise ConfigError(
                f"--workload: {part!r} is none of {known}; write for example share=0.1"
            )
        several = isinstance(Demand.model_fields[name].default, tuple)
        values[name] = tuple(value.split("+")) if several else value
    try:
        return Demand.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"--workload {text}: {in_one_line(error)}") from error
