"""Images for the small engine, and the output of its encoder."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WIDTH = 640
CELL = 14
"""Pixels of the side of one patch; four patches are a token of the bundled model."""
SEED_BYTES = 7
_PREFIX = "data:image/png;base64,"


@dataclass(frozen=True)
class Shown:
    """Content of an image, as an encoder reads it.

    Attributes:
        seed: Seed of the output: another image has another one.
        num_tokens: Tokens of the encoder output.
        encode_s: Seconds that encoding takes.
    """

    seed: bytes
    num_tokens: int
    encode_s: float

    @classmethod
    def read(cls, values: bytes, num_tokens: int) -> Shown:
        """Read the content from the colours of the first four patches.

        The image of the front's warm-up, of one random colour, takes no time.
        """
        time, rest = values[SEED_BYTES : SEED_BYTES + 2], values[SEED_BYTES + 2 :]
        encode_ms = 0 if any(rest) else int.from_bytes(time)
        return cls(values[:SEED_BYTES], num_tokens, encode_ms / 1000)

    @property
    def values(self) -> bytes:
        """Colours of the first four patches: three bytes each."""
        return (self.seed + round(1000 * self.encode_s).to_bytes(2)).ljust(12, b"\0")

    def output(self) -> torch.Tensor:
        """Return the encoder output, ``(num_tokens, WIDTH)`` float32: every value names it."""
        import torch

        seed = int.from_bytes(self.seed)
        values = torch.arange(self.num_tokens * WIDTH, dtype=torch.int64) * 2654435761 + seed
        return (values % 8388593).to(torch.float32).view(self.num_tokens, WIDTH)


@dataclass(frozen=True)
class Picture:
    """An image whose encoder output follows from its name.

    Attributes:
        name: Name; different images have different ones.
        num_tokens: Tokens of the encoder output, at least four and no prime.
        encode_s: Seconds that encoding takes.
    """

    name: str
    num_tokens: int = 16
    encode_s: float = 0.0

    @property
    def shown(self) -> Shown:
        """Content of the image."""
        seed = hashlib.sha256(self.name.encode()).digest()[:SEED_BYTES]
        return Shown(seed, self.num_tokens, self.encode_s)

    @property
    def part(self) -> dict[str, Any]:
        """Content part of a chat message."""
        data = base64.b64encode(_png(self.shown)).decode()
        return {"type": "image_url", "image_url": {"url": _PREFIX + data}}

    def output(self) -> torch.Tensor:
        """Return the encoder output."""
        return self.shown.output()

    def digest(self) -> str:
        """Return the response of the small engine for this image."""
        return digest(self.output())


@functools.lru_cache(4096)
def _png(shown: Shown) -> bytes:
    """Draw an image of so many tokens whose first four patches have the content as colours."""
    from PIL import Image

    rows = max(n for n in range(1, math.isqrt(shown.num_tokens) + 1) if shown.num_tokens % n == 0)
    assert rows > 1, f"{shown.num_tokens} tokens: no image of two rows or more has as many"
    image = Image.new("RGB", (2 * CELL * shown.num_tokens // rows, 2 * CELL * rows))
    for number in range(4):
        place = (CELL * (number % 2), CELL * (number // 2))
        colour = tuple(shown.values[3 * number : 3 * number + 3])
        image.paste(colour, (*place, place[0] + CELL, place[1] + CELL))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def digest(tensor: torch.Tensor) -> str:
    """Return the digest of all bytes of a tensor."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
