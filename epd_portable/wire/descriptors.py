"""Frozen descriptions of tensors, slots and ends of a transfer."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

Word = Annotated[str, Meta(max_length=64)]
"""A path, a device, a dtype."""
Name = Annotated[str, Meta(max_length=512, pattern="^[^\ud800-\udfff]*$")]
"""A transfer, an item, an instance, a session, a host. Halves of surrogate pairs, which JSON can
hold, could not be sent on in UTF-8."""
MAX_ADDRESS = 4096
PathAddress = Annotated[str, Meta(max_length=MAX_ADDRESS)]
"""Address of a receiving end, in the form of its path; that of device memory holds its handle."""
MAX_PATHS = 16
MAX_DIMS = 8

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes of one element, by torch's name of the dtype without its ``torch.`` prefix."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and dtype of one encoder output.

    Attributes:
        shape: ``(num_tokens, width)``; the width of models with DeepStack outputs is a multiple of
            the language model's hidden size.
        dtype: A key of `DTYPE_BYTES`.
    """

    shape: Annotated[tuple[Annotated[int, Meta(le=1 << 40)], ...], Meta(max_length=MAX_DIMS)]
    dtype: Word

    @property
    def nbytes(self) -> int:
        """Bytes of the contiguous tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r}: expected one of {', '.join(DTYPE_BYTES)}")
        if not self.shape or any(size <= 0 for size in self.shape):
            raise ValueError(f"shape {self.shape}: every dimension must be positive")


class SlotDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """A granted range of a consumer's receive pool.

    Attributes:
        pool: Name of the pool and of its shared-memory file.
        generation: Number of this grant, by which late writes and messages of an older grant are
            recognised.
    """

    pool: Name
    offset: int
    nbytes: int
    generation: int


class PathEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer path as one end offers it.

    Attributes:
        path: For example ``shm``.
        address: In the path's own form; empty if it needs none.
    """

    path: Word
    address: PathAddress = ""


class PeerDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """An end of transfers.

    Attributes:
        instance: For example ``encode-0``.
        session: Identifies the process; a restarted one has another.
        host: Equal for ends that share a host and its ``/dev/shm``.
        device: Platform and index, for example ``cpu`` or ``npu:0``.
        fingerprint: See `epd_portable.wire.fingerprint`.
        paths: Paths of this end, in its own order of preference.
    """

    instance: Name
    session: Name
    host: Name
    device: Word
    fingerprint: Name
    paths: Annotated[tuple[PathEndpoint, ...], Meta(max_length=MAX_PATHS)]

    @property
    def platform(self) -> str:
        """Name of the platform that the device belongs to."""
        return self.device.partition(":")[0]
