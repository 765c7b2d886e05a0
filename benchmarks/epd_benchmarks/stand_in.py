"""Parts that `transfer` and `step` give to a sender and a receiver in place of an engine's."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec

from epd_portable.config.secret import make_secret_file
from epd_portable.items.table import PromptItem
from epd_portable.wire.descriptors import TensorSpec

WIDTH = 2048
"""Elements of one embedding, as language models of 2 to 4 billion parameters have."""
DTYPE = "bfloat16"
TOKEN_BYTES = TensorSpec(shape=(1, WIDTH), dtype=DTYPE).nbytes
"""Items are whole embeddings, so their sizes are multiples of this."""
VALUES = 256
"""Integers from 0 to this are exact in `DTYPE`."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer, for both ends (`epd_benchmarks.ends`).

    Attributes:
        name: Name of the item and of its transfer.
        num_tokens: Size of the item, in embeddings.
        value: What the item is filled with, 1 to `VALUES`.
        encode_s: Time from the order to the encoder's output.
        consumer: Control address of the consumer.
        device: Index of the consumer's device, to which the plain copy goes too.
    """

    name: str
    num_tokens: int
    value: int
    encode_s: float
    consumer: str
    device: int

    @property
    def tensor(self) -> TensorSpec:
        """Shape and dtype of the item."""
        return TensorSpec(shape=(self.num_tokens, WIDTH), dtype=DTYPE)


class CommandDone(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of an end: when it is ready, then once for each transfer.

    Attributes:
        at_s: When the output was there, of the producer; when the placed tensor could be read, of
            the consumer. By a clock of the host.
        step_s: When the consumer's step began to place it; consumer only.
        memcpy_s: Time of a plain copy of the item right before the transfer; producer only.
    """

    at_s: float = 0.0
    step_s: float = 0.0
    memcpy_s: float = 0.0


class StandInRequest:
    """The part of vLLM's ``Request`` that the receiver and the encoder cache read.

    Its prompt holds items of these names only, each with an encoder output of one shape.
    """

    def __init__(self, request_id: str, mm_hashes: Sequence[str], tensor: TensorSpec) -> None:
        self.request_id, self.tensor = request_id, tensor
        self.mm_features = [SimpleNamespace(identifier=each) for each in mm_hashes]
        self.num_computed_tokens = 0

    def get_num_encoder_embeds(self, input_id: int) -> int:
        """Return the embeddings of an item."""
        return self.tensor.shape[0]

    def prompt(self) -> list[PromptItem]:
        """Return its items as the receiver takes them."""
        size = self.tensor.shape[0]
        return [
            PromptItem(
                input_id=index,
                mm_hash=feature.identifier,
                begin=index * size,
                end=(index + 1) * size,
                num_embeds=size,
                tensor=self.tensor,
            )
            for index, feature in enumerate(self.mm_features)
        ]


@contextlib.contextmanager
def new_secret() -> Iterator[str]:
    """Yield the path of a secret file, which goes with the block."""
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as folder:
        secret_file = str(Path(folder) / "secret")
        make_secret_file(secret_file)
        yield secret_file
