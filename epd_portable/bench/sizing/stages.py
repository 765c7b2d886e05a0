"""What each stage of a request takes: the file that `plan` reads and `plan --measure` writes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field

from epd_portable.config.document import KeyPath
from epd_portable.config.problems import checked, read_text

Duration = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1)]


class _Times(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class EncodeStage(_Times):
    """The vision tower on one picture, in seconds; pictures are encoded one after the other.

    Attributes:
        base_s: Of every picture.
        per_embedding_s: For each embedding that the language model gets.
        pixels_per_embedding: Pixels behind one of them; 28 × 28 in Qwen2.5-VL.
    """

    base_s: Duration = 0.0
    per_embedding_s: Duration
    pixels_per_embedding: Positive = 784

    def embeddings(self, pixels: int) -> int:
        """Return how many embeddings a picture becomes."""
        return math.ceil(pixels / self.pixels_per_embedding)

    def seconds(self, embeddings: float) -> float:
        """Return the time of one picture."""
        return self.base_s + self.per_embedding_s * embeddings


class PrefillStage(_Times):
    """The language model on prompt tokens, in seconds of an engine step that holds some.

    Attributes:
        base_s: Of every such step.
        per_token_s: For each token.
    """

    base_s: Duration
    per_token_s: Duration


class DecodeStage(_Times):
    """The language model on one token each of several sequences, in seconds of an engine step.

    Attributes:
        base_s: Of every such step.
        per_sequence_s: For each sequence.
    """

    base_s: Duration
    per_sequence_s: Duration


class FrontEndStage(_Times):
    """An instance's API server: requests one after the other, and beside them pictures.

    vLLM's renderer has one thread for pictures, so that texts do not wait for them.

    Attributes:
        request_s: Of every request: HTTP, chat template, tokenizer.
        picture_s: Of every picture: decoding and preprocessing.
        pixel_s: For each pixel of it.
        shares_core: The engine computes on the same core: what one does delays the other. On
            devices it is false.
    """

    request_s: Duration = 0.0
    picture_s: Duration = 0.0
    pixel_s: Duration = 0.0
    shares_core: bool = False


class TransferStage(_Times):
    """From an encoder's output to the item that the prefill+decode engine can use.

    Attributes:
        base_s: Of every item: messages, threads. 0.9 ms by ``shm`` up to 1 MiB without an engine
            (docs/measurements/2026-11-transfer.md).
        byte_s: For each byte; by ``shm`` 12 GB/s at 64 MiB (the same).
        embedding_bytes: Of one embedding: hidden size × bytes of the dtype.
    """

    base_s: Duration = 0.0009
    byte_s: Duration = 7.5e-11
    embedding_bytes: Positive = 8192

    def seconds(self, embeddings: int) -> float:
        """Return the time of one item."""
        return self.base_s + self.byte_s * self.embedding_bytes * embeddings


class RouterStage(_Times):
    """CPU time of one of the router's processes, and what instances cost it.

    Defaults are from docs/measurements/2026-11-router.md: one core, the router full.

    Attributes:
        request_s: Of every request: a text with 32 clients.
        picture_s: More for every picture; line through pictures of 100 KB and 1 MB.
        picture_byte_s: For each byte of it; the same line. Those of 4 MB took half as much again.
        chunk_s: For each streamed token, at 4,000/s; with the router full 16 µs were seen.
        choice_s: Of the choice for one item, among 10,000 encoders.
        probe_s: Of one question for an instance's health: 4 % of a core for 1,000 instances at
            100 questions a second.
        instance_bytes: Memory of one instance: 77 MB for 1,000.
    """

    request_s: Duration = 0.000256
    picture_s: Duration = 0.0004
    picture_byte_s: Duration = 2.88e-9
    chunk_s: Duration = 28.4e-6
    choice_s: Duration = 14.6e-6
    probe_s: Duration = 0.0004
    instance_bytes: Positive = 77_000

    def arrival_s(self, picture_bytes: list[int]) -> float:
        """Return the time that a request takes until it is sent on."""
        pictures = (self.picture_s + self.choice_s + self.picture_byte_s * n for n in picture_bytes)
        return self.request_s + sum(pictures)


class EngineLimits(_Times):
    """What one engine step and an engine hold; named as vLLM's arguments.

    Attributes:
        max_num_batched_tokens: Tokens of a step.
        max_num_seqs: Requests that compute or generate.
        max_encoder_tokens: Embeddings that are encoded in a step; one picture always is.
        encode_turn_s: A prefill+decode instance on a CPU encodes beside its steps, in turns with
            them of this length (`epd_portable.runners.background.TURN_S`); without, in its steps,
            as on devices, and as replicas do everywhere.
    """

    max_num_batched_tokens: Positive = 2048
    max_num_seqs: Positive = 256
    max_encoder_tokens: Positive = 2048
    encode_turn_s: Annotated[float, Field(gt=0, le=10)] | None = None


class StageTimes(_Times):
    """What each stage takes on one device, and where the figures are from.

    Attributes:
        source: For people: what was measured, on what.
        encode: Vision tower.
        prefill: Language model on prompts.
        decode: Language model on generated tokens.
        front_end: API server of an instance.
        transfer: From encode to prefill+decode instance.
        router: The router.
        engine: Limits of engines.
    """

    source: Annotated[str, Field(min_length=1)]
    encode: EncodeStage
    prefill: PrefillStage
    decode: DecodeStage
    front_end: FrontEndStage = FrontEndStage()
    transfer: TransferStage = TransferStage()
    router: RouterStage = RouterStage()
    engine: EngineLimits = EngineLimits()


MISSING: dict[KeyPath, str] = {
    ("source",): "; say where the times are from, as in: one A100, measured on 2026-11-23",
    ("encode",): "; write encode: {per_embedding_s: 0.0001}",
    ("prefill",): "; write prefill: {base_s: 0.02, per_token_s: 0.0001}",
    ("decode",): "; write decode: {base_s: 0.02, per_sequence_s: 0.0001}",
}


def load_stages(path: Path) -> StageTimes:
    """Read a file of stage times, YAML or JSON.

    Raises:
        ConfigError: The file cannot be read, or it lists every problem of its content.
    """
    return parse_stages(read_text(path), source=str(path))


def parse_stages(text: str, *, source: str = "stage times") -> StageTimes:
    """Check the text of such a file; see `load_stages`."""
    return checked(text, StageTimes, source=source, missing=MISSING)


def to_yaml(times: StageTimes) -> str:
    """Return the text of a file that `parse_stages` reads."""
    text: str = yaml.safe_dump(times.model_dump(), sort_keys=False)
    return text
