"""A request on its way through the simulation."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True, eq=False)
class PictureItem:
    """One picture of a request.

    Attributes:
        pixels: Of the picture.
        embeddings: Tokens of the prompt that it becomes.
        nbytes: Of its file.
        here: The engine is to encode it itself.
        encoded: Its embeddings are with the engine.
    """

    pixels: int
    embeddings: float
    nbytes: int = 0
    here: bool = True
    encoded: bool = False


@dataclass(kw_only=True, slots=True, eq=False)
class SimulatedRequest:
    """One request; times on the simulation's clock, in seconds.

    Attributes:
        arrival_s: When the client sent it.
        text_tokens: Of its prompt, after the pictures.
        output_tokens: Of its answer.
        items: Its pictures, in the order of the prompt.
        first_token_s: When the client got the first token; negative before.
        end_s: When it got the last one; negative before.
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
