"""What clients ask for: requests with pictures, and when each of them comes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from epd_portable.bench.sizing.stages import StageTimes
from epd_portable.config.problems import in_one_line
from epd_portable.errors import ConfigError

Choices = Annotated[tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...], Field(min_length=1)]


@dataclass(kw_only=True, slots=True, eq=False)
class PictureItem:
    """One picture of a request.

    Attributes:
        pixels: Width × height.
        embeddings: Prompt tokens that it becomes.
        here: The engine is to encode it itself.
        encoded: Its embeddings are with the engine.
    """

    pixels: int
    embeddings: int
    nbytes: int = 0
    here: bool = True
    encoded: bool = False


@dataclass(kw_only=True, slots=True, eq=False)
class SimulatedRequest:
    """One request; times on the simulation's clock, in seconds.

    Attributes:
        arrival_s: The client sends it.
        text_tokens: Prompt tokens after the pictures.
        items: Pictures, in the order of the prompt.
        first_token_s: The client has the first token; negative before.
        end_s: The client has the last one; negative before.
    """

    arrival_s: float
    text_tokens: int
    output_tokens: int
    items: list[PictureItem] = field(default_factory=list)
    first_token_s: float = -1.0
    end_s: float = -1.0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 when there is none."""
        return (self.end_s - self.first_token_s) / max(self.output_tokens - 1, 1)


class Workload(BaseModel):
    """A mix of requests. Where several values stand, each request draws one of them.

    Attributes:
        share: Part of the requests that have pictures.
        pictures: Pictures of such a request.
        size: Side of a picture in pixels.
        text: Prompt tokens besides pictures.
        picture_bytes: Size of a picture's file.
        burst: Squared coefficient of variation of the time between requests: 1 is a Poisson
            process, more comes in bursts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: Annotated[float, Field(ge=0, le=1)] = 0.1
    pictures: Choices = (1,)
    size: Choices = (448,)
    text: Choices = (64,)
    output: Choices = (60,)
    picture_bytes: Annotated[int, Field(ge=1)] = 100_000
    burst: Annotated[float, Field(gt=0, le=100)] = 1.0

    @classmethod
    def read(cls, text: str) -> Workload:
        """Read a mix as the command line writes it: ``share=0.1,pictures=1+4,size=448``.

        Raises:
            ConfigError: A key is unknown or its value out of range.
        """
        values: dict[str, object] = {}
        for part in filter(None, text.split(",")):
            name, equals, value = part.partition("=")
            if not equals or name not in cls.model_fields:
                raise ConfigError(
                    f"--workload: {part!r} is none of {', '.join(cls.model_fields)}; write for "
                    "example share=0.1"
                )
            several = isinstance(cls.model_fields[name].default, tuple)
            values[name] = tuple(value.split("+")) if several else value
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"--workload {text}: {in_one_line(error)}") from error

    def __str__(self) -> str:
        """Return it as `read` takes it."""
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
            rate: Requests per second, positive.
            seed: Seed of everything that is drawn.
        """
        draw = np.random.default_rng(seed)
        gaps = draw.gamma(1 / self.burst, self.burst, count)
        arrivals_s = (np.cumsum(gaps) / rate).tolist()
        has_pictures = draw.random(count) < self.share
        pictures = np.where(has_pictures, draw.choice(self.pictures, count), 0).tolist()
        pixels = (draw.choice(self.size, count) ** 2).tolist()
        texts = draw.choice(self.text, count).tolist()
        outputs = draw.choice(self.output, count).tolist()
        return [
            SimulatedRequest(
                arrival_s=arrivals_s[index],
                text_tokens=texts[index],
                output_tokens=outputs[index],
                items=[
                    PictureItem(
                        pixels=pixels[index],
                        embeddings=times.encode.embeddings(pixels[index]),
                        nbytes=self.picture_bytes,
                    )
                    for _ in range(pictures[index])
                ],
            )
            for index in range(count)
        ]
