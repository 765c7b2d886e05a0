"""What `transfer` says to the two processes that it starts, and what they answer."""

from __future__ import annotations

import msgspec

from epd_portable.wire.descriptors import TensorSpec

WIDTH = 2048
"""Elements of one embedding: as language models of 2 to 4 billion parameters have them."""
DTYPE = "bfloat16"
TOKEN_BYTES = TensorSpec(shape=(1, WIDTH), dtype=DTYPE).nbytes
"""Items are whole embeddings, so their sizes are multiples of this."""
VALUES = 256
"""Integers from 0 to this are exact in `DTYPE`."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer, for both ends.

    Attributes:
        name: Of the item and of its transfer.
        num_tokens: Size of the item, in embeddings.
        value: What the item is filled with, 1 to `VALUES`.
        encode_s: Time from the order to the encoder's output.
        consumer: Control address of the consumer.
        device: The consumer's; the plain copy goes there too.
    """

    name: str
    num_tokens: int
    value: int
    encode_s: float
    consumer: str
    device: int

    @property
    def tensor(self) -> TensorSpec:
        """The item."""
        return TensorSpec(shape=(self.num_tokens, WIDTH), dtype=DTYPE)


class CommandDone(msgspec.Struct, frozen=True, kw_only=True):
    """Both ends' answer: ready at first, then once for each transfer that ended.

    Attributes:
        memcpy_s: Producer only: what a plain copy of the item took, right before the transfer.
    """

    memcpy_s: float = 0.0
