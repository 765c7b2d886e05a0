"""What clients ask for: requests with pictures, and when each of them comes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from epd_portable.bench.mix import Mix
from epd_portable.bench.sizing.stages import StageTimes


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


def draw_requests(
    mix: Mix, times: StageTimes, *, rate: float, count: int, seed: int
) -> list[SimulatedRequest]:
    """Return requests in the order of arrival, a Poisson process.

    The same seed gives the same requests at every rate, closer together or farther apart.

    Args:
        times: Tell how many embeddings a picture has.
        rate: Requests per second, positive.
        seed: Seed of everything that is drawn.
    """
    draw = np.random.default_rng(seed)
    arrivals_s = (np.cumsum(draw.exponential(1.0, count)) / rate).tolist()
    has_pictures = draw.random(count) < mix.share
    pictures = np.where(has_pictures, draw.choice(mix.pictures, count), 0).tolist()
    pixels = (draw.choice(mix.size, count) ** 2).tolist()
    return [
        SimulatedRequest(
            arrival_s=arrivals_s[index],
            text_tokens=mix.text,
            output_tokens=mix.output,
            items=[
                PictureItem(pixels=pixels[index], embeddings=times.encode.embeddings(pixels[index]))
                for _ in range(pictures[index])
            ],
        )
        for index in range(count)
    ]
