"""Small files of every format, made by those who decode them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

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


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def run_length_bmp(image: Image.Image) -> bytes:
    """Return an image as an 8-bit BMP in runs of up to three pixels."""
    grey, (width, height) = image.convert("L"), image.size
    lines = bytearray()
    for y in reversed(range(height)):
        x = 0
        while x < width:
            run = min(1 + (x + y) % 3, width - x)
            lines += bytes((run, grey.getpixel((x, y))))
            x += run
        lines += b"\0\0"
    lines += b"\0\1"
    palette = b"".join(bytes((n, n, n, 0)) for n in range(256))
    offset = 54 + len(palette)
    head = b"BM" + struct.pack("<IHHI", offset + len(lines), 0, 0, offset)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(lines), 0, 0, 256, 256)
    return head + info + palette + bytes(lines)


def deep_ppm(image: Image.Image) -> bytes:
    """Return an image as a PPM of 16 bits."""
    values = b"".join(bytes((each, each)) for each in image.convert("RGB").tobytes())
    return b"P6 %d %d 65535\n" % image.size + values


UNUSUAL: dict[str, Callable[[Image.Image], bytes]] = {
    "PPM of 16 bits": deep_ppm,
    "run-length BMP": lambda image: run_length_bmp(image.resize((400, 400))),
    "QOI": lambda image: saved(image, "QOI"),
    "AVIF": lambda image: saved(image, "AVIF"),
}
"""Files that take another way through decoders than photographs of the web."""
