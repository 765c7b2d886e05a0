"""Digests of payloads, to find out whether the bytes that arrived are those that were sent."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from epd_portable.errors import CorruptPayloadError

if TYPE_CHECKING:
    import torch

_DIGEST_BYTES = 16


def digest_of(data: torch.Tensor) -> str:
    """Return a digest of a tensor's bytes; about a second for 1 GB.

    Args:
        data: Contiguous; one that is not in host memory is copied there, blocking.
    """
    flat = data.detach().view(-1).view(_uint8()).cpu()
    return digest_of_bytes(flat.numpy().data)


def digest_of_bytes(data: memoryview) -> str:
    """Return the digest of bytes, that of a tensor which they are."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def check_digest(data: torch.Tensor, expected: str, what: str) -> None:
    """Refuse bytes that are not those that were sent.

    Args:
        data: See `digest_of`.
        expected: Digest of what was sent.
        what: Whose bytes, for the error.

    Raises:
        CorruptPayloadError: They differ.
    """
    found = digest_of(data)
    if found != expected:
        raise CorruptPayloadError(
            f"{what}: {data.numel() * data.element_size()} bytes have digest {found}, those that "
            f"were sent had {expected}: somebody else wrote there, or the transfer path is broken; "
            "set transfer.path to another path"
        )


def _uint8() -> torch.dtype:
    import torch

    return torch.uint8
