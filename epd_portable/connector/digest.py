"""Digests of payloads: whether the bytes that arrived are those that were sent."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from epd_portable.errors import CorruptPayloadError

if TYPE_CHECKING:
    import torch

_DIGEST_BYTES = 16


def digest_of(data: torch.Tensor) -> str:
    """Return a digest of a contiguous tensor's bytes; blocks, about a second for 1 GB."""
    import torch

    flat = data.detach().view(-1).view(torch.uint8).cpu()
    return digest_of_bytes(flat.numpy().data)


def digest_of_bytes(data: memoryview) -> str:
    """Return `digest_of` a tensor of these bytes."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def check_digest(data: torch.Tensor, expected: str, what: str) -> None:
    """Raise `CorruptPayloadError` if a contiguous tensor has another digest."""
    found = digest_of(data)
    if found != expected:
        raise CorruptPayloadError(
            f"{what}: {data.numel() * data.element_size()} bytes have digest {found}, those that "
            f"were sent had {expected}: something else wrote there, or the transfer path is "
            "broken; set transfer.path to another path"
        )
