"""Loads an image in each format that Pillow writes, by vLLM's connector as it is and within bounds.

A process of its own, because bounds of decoders hold for a process: one JSON object a line, with
``name``, ``plain`` and ``bounded``: ``refused``, or a digest of the pixels.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

from epd_portable.config.front import MediaSection
from epd_portable.vllm_plugin import media_bounds
from tests.integration.vllm_plugin.hostile_media import tiff
from tests.unit.media.samples import UNUSUAL, chunk, saved

SIDE = 112
NOISE = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 4), dtype=np.uint8)
GRADIENT = np.indices((SIDE, SIDE)).sum(0).astype(np.uint8)
RGBA = Image.fromarray(NOISE, "RGBA")
MODES = ("RGB", "RGBA", "L", "LA", "P", "PA", "1", "I;16", "I", "F", "CMYK", "YCbCr", "LAB", "HSV")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "PNG": [{"save_all": True, "append_images": [RGBA]}, {"compress_level": 0}],
    "JPEG": [{"progressive": True}, {"exif": b"Exif\0\0"}, {"comment": b"c" * 60_000}],
    "GIF": [
        {"save_all": True, "append_images": [RGBA]},
        {"interlace": 0},
        {"comment": b"c" * 10**6},
    ],
    "ICO": [{"bitmap_format": "bmp"}, {"sizes": [(16, 16), (64, 64)]}],
    "TIFF": [
        *({"compression": f"tiff_{name}"} for name in ("lzw", "adobe_deflate", "jpeg", "ccitt")),
        *({"compression": name} for name in ("packbits", "group3", "group4", "zstd")),
        *({"big_tiff": True}, {"save_all": True, "append_images": [RGBA] * 3}),
        {"strip_size": 1},
    ],
    "WEBP": [{"lossless": True}, {"save_all": True, "append_images": [RGBA]}],
    "JPEG2000": [{"no_jp2": True}, {"tile_size": (32, 32)}, {"irreversible": True}],
    "AVIF": [
        *({"subsampling": name} for name in ("4:4:4", "4:0:0")),
        {"save_all": True, "append_images": [RGBA]},
    ],
    "TGA": [{"compression": "tga_rle"}],
    "SGI": [{"bpc": 2}],
    "DDS": [{"pixel_format": name} for name in ("DXT1", "DXT3", "DXT5", "BC2", "BC3", "BC5")],
    "BLP": [{"blp_version": "BLP2"}],
    "MPO": [{"save_all": True, "append_images": [RGBA.convert("RGB")]}],
}
"""Further ways to write a format, in the modes `RGB`, `P` and `1`."""


def converted(mode: str) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray(NOISE[..., 0].astype(np.uint16) * 257)
    return RGBA.convert("RGB").convert("LAB") if mode == "HSV" else RGBA.convert(mode)


def written() -> Iterator[tuple[str, bytes]]:
    """Yield a file of each format, mode and option that Pillow writes."""
    Image.init()
    for kind in sorted(Image.SAVE):
        for mode in MODES:
            for options in [{}, *(OPTIONS.get(kind, []) if mode in ("RGB", "P", "1") else [])]:
                try:
                    image = RGBA.convert("RGB").convert(mode) if mode == "LAB" else converted(mode)
                    speed = {"speed": 10} if kind == "AVIF" else {}
                    data = saved(image, kind, **speed, **options)
                except (OSError, ValueError, KeyError, RuntimeError, SystemError):
                    continue  # Pillow does not write that.
                yield f"{kind} {mode} {','.join(map(str, options))}".strip(), data
    for orientation in (3, 6):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for kind in ("JPEG", "PNG", "WEBP", "AVIF", "TIFF"):
            data = saved(RGBA.convert("RGB").crop((0, 0, 100, 40)), kind, exif=exif)
            yield f"{kind} of orientation {orientation}", data


def crafted() -> Iterator[tuple[str, bytes]]:
    """Yield files that Pillow reads and does not write."""
    deep = NOISE[..., :3].astype(">u2") * 257
    yield from ((name, write(RGBA.convert("RGB"))) for name, write in UNUSUAL.items())
    yield "PGM of 16 bits", b"P5 %d %d 65535\n" % (SIDE, SIDE) + deep[..., 0].tobytes()
    yield "PPM of 10 bits", b"P6 %d %d 1023\n" % (SIDE, SIDE) + (deep >> 6).astype(">u2").tobytes()
    numbers = b" ".join(b"%d" % each for each in NOISE[..., :3].flatten())
    yield "plain PPM", b"P3 %d %d 255\n" % (SIDE, SIDE) + numbers
    yield "plain PBM", b"P1 %d %d\n" % (SIDE, SIDE) + b"01" * (SIDE * SIDE // 2)
    yield "interlaced PNG", interlaced()
    yield "PNG of small chunks", in_small_chunks(saved(RGBA, "PNG"))
    tags = [(256, 3, SIDE), (257, 3, SIDE), (258, 3, 8), (259, 3, 1), (262, 3, 1), (277, 3, 1)]
    tile = [(322, 3, SIDE), (323, 3, SIDE), (324, 4, -1), (325, 4, SIDE * SIDE)]
    yield "tiled TIFF", tiff(*tags, *tile, data=GRADIENT.tobytes())
    yield "HEIC", struct.pack(">I4s4s", 24, b"ftyp", b"heic") + bytes(100)
    yield "text", b"no image at all"
    yield "nothing", b""


def interlaced() -> bytes:
    """Return a grey PNG in Adam7's seven passes."""
    places = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2)]
    raw = b"".join(
        b"\0" + row.tobytes()
        for x, y, right, down in [*places, (0, 1, 1, 2)]
        for row in GRADIENT[y::down, x::right]
    )
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 0, 0, 0, 1)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(raw)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def in_small_chunks(data: bytes, nbytes: int = 256) -> bytes:
    """Return a PNG whose pixels come in chunks of so many bytes."""
    begin = data.index(b"IDAT") - 4
    (length,) = struct.unpack(">I", data[begin : begin + 4])
    pixels, rest = data[begin + 8 : begin + 8 + length], data[begin + 12 + length :]
    parts = [chunk(b"IDAT", pixels[at : at + nbytes]) for at in range(0, length, nbytes)]
    return data[:begin] + b"".join(parts) + rest


def loaded(data: bytes) -> str:
    """Return a digest of the pixels that vLLM's connector makes of a file, or ``refused``."""
    connector = MEDIA_CONNECTOR_REGISTRY.load("http")
    url = f"data:image/x;base64,{base64.b64encode(data).decode()}"
    try:
        image = connector.fetch_image(url).media
    except ValueError:
        return "refused"
    return f"{image.size} {image.mode} {hashlib.blake2s(image.tobytes()).hexdigest()}"


def main() -> None:
    """Load each file twice, and print both results."""
    files = [*written(), *crafted()]
    plain = [loaded(data) for _, data in files]
    media_bounds.bound_process(MediaSection())
    for (name, data), expected in zip(files, plain, strict=True):
        print(json.dumps({"name": name, "plain": expected, "bounded": loaded(data)}))


if __name__ == "__main__":
    main()
