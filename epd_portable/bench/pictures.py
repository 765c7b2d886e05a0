"""Pictures for requests: cheap to make, different for every seed, in need of no library."""

from __future__ import annotations

import base64
import random
import struct
import zlib

_BLOCK = 14
"""Side in pixels of the squares that a picture is made of."""


def png(seed: int, size: int) -> bytes:
    """Return a square PNG of coloured blocks.

    Args:
        seed: Decides the colours.
        size: Side in pixels, positive.
    """
    colours = random.Random(seed)
    rows = []
    for top in range(0, size, _BLOCK):
        blocks = [colours.randbytes(3) * _BLOCK for _ in range(0, size, _BLOCK)]
        row = b"\0" + b"".join(blocks)[: 3 * size]
        rows.append(row * min(_BLOCK, size - top))
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def data_url(seed: int, size: int) -> str:
    """Return the picture as OpenAI requests carry it."""
    return "data:image/png;base64," + base64.b64encode(png(seed, size)).decode("ascii")


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
