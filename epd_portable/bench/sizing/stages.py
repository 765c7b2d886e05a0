"""What each stage of a request takes: the file that `plan` reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from epd_portable.config.document import KeyPath
from epd_portable.config.problems import checked, read_text

Duration = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1)]


class _Times(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class EncodeStage(_Times):
    """The vision tower, in seconds; pictures are encoded one after the other.

    Attributes:
        base_s: Each picture.
        per_embedding_s: Each embedding that the language model gets.
        pixels_per_embedding: 28 × 28 in Qwen2.5-VL.
    """

    base_s: Duration = 0.0
    per_embedding_s: Duration
    pixels_per_embedding: Positive = 784

    def embeddings(self, pixels: float) -> int:
        """Return how many embeddings a picture becomes."""
        return math.ceil(pixels / self.pixels_per_embedding)

    def seconds(self, embeddings: float) -> float:
        """Return the time of one picture."""
        return self.base_s + self.per_embedding_s * embeddings


class PrefillStage(_Times):
    """An engine step with prompt tokens, in seconds: once, and for each token."""

    base_s: Duration
    per_token_s: Annotated[float, Field(gt=0, le=3600)]


class DecodeStage(_Times):
    """An engine step that generates, in seconds: once, and for each sequence."""

    base_s: Duration
    per_sequence_s: Duration


class FrontEndStage(_Times):
    """An instance's API server: one thread for requests and, as in vLLM's renderer, one for media.

    Attributes:
        request_s: Each request: HTTP, chat template, tokenizer.
        picture_s: Each picture: decoding and preprocessing.
        pixel_s: Each pixel of it.
    """

    request_s: Duration = 0.0
    picture_s: Duration = 0.0
    pixel_s: Duration = 0.0


class TransferStage(_Times):
    """From an encoder's output to an item that the prefill+decode engine can use, in seconds.

    Attributes:
        base_s: Each item. 0.9 ms by ``shm`` up to 1 MiB (docs/measurements/2026-11-transfer.md).
        byte_s: Each byte; 12 GB/s by ``shm`` at 64 MiB (same page).
        embedding_bytes: Hidden size × bytes of the dtype.
    """

    base_s: Duration = 0.0009
    byte_s: Duration = 7.5e-11
    embedding_bytes: Positive = 8192

    def seconds(self, embeddings: int) -> float:
        """Return the time of one item."""
        return self.base_s + self.byte_s * self.embedding_bytes * embeddings


class EngineLimits(_Times):
    """What an engine step and an engine hold; named as vLLM's arguments.

    Attributes:
        max_num_batched_tokens: Tokens of a step.
        max_num_seqs: Requests that compute or generate.
        max_encoder_tokens: Embeddings that are encoded in a step; one picture always is.
    """

    max_num_batched_tokens: Positive = 2048
    max_num_seqs: Positive = 256
    max_encoder_tokens: Positive = 2048


class StageTimes(_Times):
    """What each stage takes on one device, and where the figures are from.

    Attributes:
        source: What was measured, on what, in words.
    """

    source: Annotated[str, Field(min_length=1)]
    encode: EncodeStage
    prefill: PrefillStage
    decode: DecodeStage
    front_end: FrontEndStage = FrontEndStage()
    transfer: TransferStage = TransferStage()
    engine: EngineLimits = EngineLimits()


_MISSING: dict[KeyPath, str] = {
    ("source",): "; say where the times are from, as in: one A100, measured on 2026-11-23",
    ("encode",): "; write encode: {per_embedding_s: 0.0001}",
    ("prefill",): "; write prefill: {base_s: 0.02, per_token_s: 0.0001}",
    ("decode",): "; write decode: {base_s: 0.02, per_sequence_s: 0.0001}",
}


def load_stages(path: Path) -> StageTimes:
    """Read a file of stage times, YAML or JSON.

    Raises:
        ConfigError: The file cannot be read, or has problems: names all of them.
    """
    return checked(read_text(path), StageTimes, source=str(path), missing=_MISSING)
