"""Small files of every format, made by those who decode them."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

from PIL import Image

WIDTH, HEIGHT = 61, 47


def text(data: bytes) -> memoryview:
    return memoryview(base64.b64encode(data))


def still(kind: str, width: int = WIDTH, height: int = HEIGHT, **options: Any) -> bytes:
    return _saved([_noise(width, height)], kind, **options)


def animation(kind: str, frames: int = 5, **options: Any) -> bytes:
    pictures = [_noise(WIDTH, HEIGHT, seed) for seed in range(frames)]
    return _saved(pictures, kind, save_all=True, append_images=pictures[1:], **options)


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
ANIMATIONS: dict[str, bytes] = {
    "gif": animation("GIF"),
    "png": animation("PNG"),
    "webp": animation("WEBP"),
    "tiff": animation("TIFF"),
    "avif": animation("AVIF"),
    "mpo": animation("MPO"),
}


def png(width: int, height: int, *, bits: int = 1, chunks: bytes = b"") -> bytes:
    """Return a real PNG of black, however large."""
    row = b"\0" + bytes((width * bits + 7) // 8)
    packer = zlib.compressobj(9)
    pixels = b"".join([packer.compress(row) for _ in range(height)] + [packer.flush()])
    return _png(width, height, bits, chunks, pixels)


def png_header(width: int, height: int, chunks: bytes = b"") -> bytes:
    """Return a PNG that says how large it is, and no more."""
    return _png(width, height, 8, chunks, b"")


def _png(width: int, height: int, bits: int, chunks: bytes, pixels: bytes) -> bytes:
    size = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    return b"".join(
        (b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", size), chunks, chunk(b"IDAT", pixels))
    ) + chunk(b"IEND", b"")


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def gif(frames: int, *, screen: tuple[int, int] = (1, 1), frame: tuple[int, int] = (1, 1)) -> bytes:
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0, 0, 0)
    each = b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02L\x01\0"
    return head + each * frames + b";"


def box(name: bytes, *content: bytes, length: int | None = None) -> bytes:
    data = b"".join(content)
    return struct.pack(">I", 8 + len(data) if length is None else length) + name + data


def mp4(
    *,
    size: tuple[int, int] = (320, 240),
    times: tuple[tuple[int, int], ...] = ((100, 1),),
    scale: int = 25,
    duration: int = 100,
    sampled: int | None = None,
    entry_size: tuple[int, int] | None = None,
    fragments: bytes = b"",
) -> bytes:
    """Return the headers of an MP4 file with one video track."""
    width, height = size
    count = sum(number for number, _ in times) if sampled is None else sampled
    entry = bytes(24) + struct.pack(">HH", *(entry_size or size)) + bytes(50)
    header = struct.pack(">IIIII", 0, 0, 0, scale, duration) + bytes(80)
    return box(b"ftyp", b"isom\0\0\2\0isommp41") + box(
        b"moov",
        box(b"mvhd", header),
        box(
            b"trak",
            box(
                b"tkhd",
                struct.pack(">12xI60x", 1),
                struct.pack(">II", width << 16, height << 16),
            ),
            box(
                b"mdia",
                box(b"mdhd", header[:24]),
                box(b"hdlr", bytes(8), b"vide", bytes(12)),
                box(
                    b"minf",
                    box(
                        b"stbl",
                        box(b"stsd", struct.pack(">II", 0, 1), box(b"avc1", entry)),
                        box(
                            b"stts",
                            struct.pack(">II", 0, len(times)),
                            *(struct.pack(">II", *pair) for pair in times),
                        ),
                        box(b"stsz", struct.pack(">III", 0, 1000, count)),
                    ),
                ),
            ),
        ),
        fragments,
    )


def recorded(path: Path, codec: str, *, frames: int = 40, fps: float = 25.0) -> bytes:
    """Return a video that OpenCV wrote."""
    import cv2
    import numpy as np

    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), fps, (64, 48))
    assert writer.isOpened(), codec
    for number in range(frames):
        writer.write(np.full((48, 64, 3), 5 * number % 256, np.uint8))
    writer.release()
    return path.read_bytes()


def ebml(name: int, *content: bytes, unknown: bool = False) -> bytes:
    data = b"".join(content)
    head = name.to_bytes((name.bit_length() + 7) // 8, "big")
    length = b"\x01" + (b"\xff" * 7 if unknown else len(data).to_bytes(7, "big"))
    return head + length + data


def live_webm(*, clusters: int = 3, blocks: int = 10) -> bytes:
    """Return a WebM whose recorder did not know how long it would be: no length anywhere."""
    track = ebml(
        0xAE,
        ebml(0xD7, b"\1"),
        ebml(0x83, b"\1"),
        ebml(0xE0, ebml(0xB0, b"\2\x80"), ebml(0xBA, b"\1\xe0")),
    )
    made = [
        ebml(0x1549A966, ebml(0x2AD7B1, (1_000_000).to_bytes(3, "big"))),
        ebml(0x1654AE6B, track),
    ]
    for number in range(clusters):
        block = [
            ebml(0xA3, b"\x81" + struct.pack(">h", 100 * index) + b"\x80" + bytes(40))
            for index in range(blocks)
        ]
        tick = (1000 * number).to_bytes(4, "big")
        made.append(ebml(0x1F43B675, ebml(0xE7, tick), *block, unknown=True))
    return ebml(0x1A45DFA3, ebml(0x4282, b"webm")) + ebml(0x18538067, *made, unknown=True)
