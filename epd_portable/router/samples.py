"""Small items for first requests, each different from all others: no cache knows them."""

from __future__ import annotations

import base64
import io
import secrets
import struct
import wave
import zlib
from typing import Any

_SIDE = 112
_SAMPLES = 16_000


def picture() -> dict[str, Any]:
    """Return a square of a random colour, 112 × 112 pixels, as a part of a message."""
    rows = (b"\0" + secrets.token_bytes(3) * _SIDE) * _SIDE
    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def clip() -> dict[str, Any]:
    """Return half a second of noise, 16,000 samples a second, as a part of a message."""
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setnchannels(1)
        opened.setsampwidth(2)
        opened.setframerate(_SAMPLES)
        opened.writeframes(secrets.token_bytes(_SAMPLES))
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
