"""Small files of every format, made by those who decode them."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image

WIDTH, HEIGHT = 61, 47


def still(kind: str) -> bytes:
    row = bytes((17 * n + n // 7) % 256 for n in range(3 * WIDTH))
    buffer = io.BytesIO()
    Image.frombytes("RGB", (WIDTH, HEIGHT), row * HEIGHT).save(buffer, kind)
    return buffer.getvalue()


STILLS = {kind: still(kind.upper()) for kind in ("png", "jpeg", "gif", "webp")}


def png(width: int, height: int, *, bits: int = 1, chunks: bytes = b"") -> bytes:
    """Return a real PNG of black, however large."""
    row = b"\0" + bytes((width * bits + 7) // 8)
    packer = zlib.compressobj(9)
    pixels = b"".join([packer.compress(row) for _ in range(height)] + [packer.flush()])
    return _png(width, height, bits, chunks, pixels)


def _png(width: int, height: int, bits: int, chunks: bytes, pixels: bytes) -> bytes:
    size = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    return b"".join(
        (b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", size), chunks, chunk(b"IDAT", pixels))
    ) + chunk(b"IEND", b"")


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
