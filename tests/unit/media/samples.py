"""Small files of every format, made by those who decode them."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

from PIL import Image

WIDTH, HEIGHT = 61, 47


def text(data: bytes) -> memoryview:
    return memoryview(base64.b64encode(data))


def still(kind: str, width: int = WIDTH, height: int = HEIGHT, **options: Any) -> bytes:
    return _saved([_noise(width, height)], kind, **options)


def _saved(pictures: list[Image.Image], kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pictures[0].save(buffer, kind, **options)
    return buffer.getvalue()


def _noise(width: int, height: int, seed: int = 0) -> Image.Image:
    row = bytes((17 * n * (seed + 1) + n // 7) % 256 for n in range(3 * width))
    return Image.frombytes("RGB", (width, height), row * height)


STILLS: dict[str, bytes] = {
    "png": still("PNG"),
    "png of one bit": _saved([Image.new("1", (WIDTH, HEIGHT))], "PNG"),
    "jpeg": still("JPEG"),
    "progressive jpeg": still("JPEG", progressive=True, exif=b"Exif\0\0" + bytes(3000)),
    "gif": still("GIF"),
    "webp": still("WEBP"),
    "lossless webp": still("WEBP", lossless=True),
    "webp with more": still("WEBP", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0"),
    "bmp": still("BMP"),
    "tiff": still("TIFF"),
    "compressed tiff": still("TIFF", compression="tiff_lzw"),
    "big tiff": still("TIFF", big_tiff=True),
    "avif": still("AVIF"),
    "jpeg 2000": still("JPEG2000"),
    "jpeg 2000 code stream": still("JPEG2000", no_jp2=True),
    "ppm": still("PPM"),
    "pgm": _saved([Image.new("L", (WIDTH, HEIGHT))], "PPM"),
    "pbm": _saved([Image.new("1", (WIDTH, HEIGHT))], "PPM"),
    "ppm with remarks": b"P6 # by hand\n#\n61\n # high\n47 255\n" + bytes(3 * WIDTH * HEIGHT),
    "ico": still("ICO", 64, 48, sizes=[(16, 12), (32, 24), (64, 48)]),
    "ico of bitmaps": still("ICO", 64, 48, sizes=[(64, 48)], bitmap_format="bmp"),
}


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
