"""Pictures for the small engine, and what its encoder makes of them."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WIDTH = 64
TOKEN_BYTES = WIDTH * 4
_PREFIX = "data:image/png;base64,"


@dataclass(frozen=True)
class Picture:
    """A picture that says itself what its encoder output is.

    Attributes:
        name: Different pictures have different names.
        num_tokens: Of its encoder output.
        encode_s: How long its encoder takes.
    """

    name: str
    num_tokens: int = 16
    encode_s: float = 0.0

    @property
    def part(self) -> dict[str, Any]:
        """Content part of a chat message."""
        data = base64.b64encode(json.dumps(asdict(self)).encode()).decode()
        return {"type": "image_url", "image_url": {"url": _PREFIX + data}}

    @classmethod
    def of(cls, url: str) -> Picture:
        """Read a picture from the URL of its part."""
        return cls(**json.loads(base64.b64decode(url.removeprefix(_PREFIX))))

    def output(self) -> torch.Tensor:
        """Return the encoder output, ``(num_tokens, WIDTH)`` float32: every value names it."""
        import torch

        seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:7])
        values = torch.arange(self.num_tokens * WIDTH, dtype=torch.int64) * 2654435761 + seed
        return (values % 8388593).to(torch.float32).view(self.num_tokens, WIDTH)

    def digest(self) -> str:
        """Return what the small engine answers for this picture."""
        return digest(self.output())


def digest(tensor: torch.Tensor) -> str:
    """Return the digest of all bytes of a tensor."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
