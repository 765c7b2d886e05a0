"""Identifies the weights of a checkpoint without reading all of them.

Hashes names, shapes and dtypes of all tensors, and a sample of the values of each: further training
or merging changes nearly every value of the tensors concerned. The same tensors in other files, or
in another folder, are the same weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from epd_portable.errors import ConfigError

_SAMPLE_BYTES = 64
_MAX_HEADER_BYTES = 100 << 20
_EXPERT = ".experts."
"""Values of tensors with such names are not sampled: there are thousands, of language models."""


def identity(folder: Path) -> str:
    """Return a digest of the weights in a folder, 16 digits.

    Raises:
        ConfigError: There are none in ``*.safetensors``, or a file is damaged.
    """
    try:
        parts = sorted(part for path in folder.glob("*.safetensors") for part in _tensors(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the weights in {folder} cannot be told from others: {error}") from error
    if not parts:
        raise ConfigError(
            f"the weights in {folder} cannot be told from others: there is no *.safetensors; "
            "convert them, or leave store out of the configuration"
        )
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def _tensors(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= _MAX_HEADER_BYTES:
            raise ValueError(f"{path} has a header of {size} bytes")
        header = json.loads(file.read(size))
        for name, about in header.items():
            if name == "__metadata__":
                continue
            first, end = about["data_offsets"]
            digest = hashlib.blake2b(digest_size=16)
            digest.update(json.dumps([name, about["dtype"], about["shape"]]).encode())
            if _EXPERT not in name:
                for offset in (first, (first + end) // 2, max(first, end - _SAMPLE_BYTES)):
                    wanted = min(_SAMPLE_BYTES, end - offset)
                    data = os.pread(file.fileno(), wanted, 8 + size + offset)
                    if len(data) != wanted:
                        raise ValueError(f"{path} ends within {name}")
                    digest.update(data)
            yield digest.digest()
