"""Loads hostile files as an instance's API server does, and prints what each of them cost.

A process of its own, because bounds of decoders hold for a process: one JSON object a line, with
``name``, ``outcome`` (``loaded``, or why it was refused with `ValueError`, which vLLM answers with
400), ``cpu_ms`` and ``peak_mib`` beyond what the process had before. Any other error ends it.
"""

from __future__ import annotations

import base64
import contextvars
import io
import json
import os
import struct
import tempfile
import time
import wave
from collections.abc import Iterator
from pathlib import Path

LIMIT = 1 << 20
SIDE = 3000
"""Side of images beyond the limit of 1 Mi pixels."""
os.environ |= {"VLLM_MAX_IMAGE_PIXELS": str(LIMIT), "VLLM_MAX_AUDIO_DECODE_DURATION_S": "10"}

import cv2  # noqa: E402
import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY  # noqa: E402

from epd_portable.config.front import MediaSection  # noqa: E402
from epd_portable.vllm_plugin import media_bounds  # noqa: E402
from tests.unit.media import samples  # noqa: E402
from tests.unit.media.samples import chunk, png  # noqa: E402

SMALL = MediaSection(max_item_pixels=LIMIT, max_request_pixels=4 * LIMIT, max_seconds=10)


def saved(kind: str, side: int = SIDE, **options: object) -> bytes:
    return samples.saved(Image.new("RGB", (side, side)), kind, **options)


def fli(beginning: bytes, side: int = 9000) -> bytes:
    """Return a FLI of one frame that begins as something else."""
    head = bytearray(128)
    head[6:16] = struct.pack("<HHHHH", 1, side, side, 8, 3)
    head[: len(beginning)] = beginning
    frame = struct.pack("<IHH8x", 64, 0xF1FA, 1) + struct.pack("<IHHH", 12, 12, 0, 0)
    return bytes(head) + frame + bytes(48)


def icon(picture: bytes) -> bytes:
    entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(picture), 22)
    return b"\0\0\1\0\1\0" + entry + picture


def apple_icon(picture: bytes) -> bytes:
    entry = b"icp4" + struct.pack(">I", 8 + len(picture)) + picture
    return b"icns" + struct.pack(">I", 8 + len(entry)) + entry


def texture(picture: bytes) -> bytes:
    """Return a BLP of 16 × 16 pixels that holds a JPEG."""
    head = b"BLP1" + struct.pack("<6I", 0, 0, 16, 16, 4, 0)
    places = struct.pack("<32I", 160, *[0] * 15, len(picture), *[0] * 15)
    return head + places + bytes(4) + picture


def tiff(*tags: tuple[int, int, int], data: bytes = b"") -> bytes:
    """Return a TIFF; a tag's value of -1 is where its data are."""
    where = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(
        struct.pack("<HHII", tag, kind, 1, where if value < 0 else value)
        for tag, kind, value in tags
    )
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(4) + data


def tile_of(width: int) -> bytes:
    """Return 1 × 1 pixels in one tile, white by CCITT G4: a bit for each row."""
    data = b"\xff" * (width // 8) + b"\0\x10\1"
    tags = [(256, 3, 1), (257, 3, 1), (258, 3, 1), (259, 3, 4), (262, 3, 0), (277, 3, 1)]
    place = [(322, 4, width), (323, 4, width), (324, 4, -1), (325, 4, len(data))]
    return tiff(*tags, *place, data=data)


def run_length_tga(beginning: bytes, side: int = 2048) -> bytes:
    head = beginning + struct.pack("<HHBB", side, side, 24, 0)
    return head + b"\xff\0\0\0" * (side * side // 128)


def disguised_tga() -> bytes:
    """Return a TGA whose first bytes are a box of a HEIC."""
    return run_length_tga(struct.pack(">I4s4s", 0x0A20, b"ftyp", b"heic"))


def pictures() -> Iterator[tuple[str, bytes]]:
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "JPEG2000"):
        yield f"large {kind}", saved(kind)
    for kind in ("BMP", "TIFF", "PPM"):
        # As they come, without compression: the text of a large file would be most of the memory.
        yield f"large {kind}", saved(kind, 1100)
    for bits in (1, 2, 4, 8):
        yield f"PNG of {bits} bits", png(SIDE, SIDE, bits=bits)
    for width, height in ((1, 2_000_000), (2_000_000, 1), (1025, 1024), (13_000, 13_000)):
        yield f"PNG of {width} × {height}", png(width, height)
    yield "TIFF of LZW", saved("TIFF", compression="tiff_lzw")
    yield "big TIFF", saved("TIFF", 1100, big_tiff=True)
    yield "progressive JPEG", saved("JPEG", progressive=True)
    yield "code stream", saved("JPEG2000", no_jp2=True)
    yield "lossless WebP", saved("WEBP", lossless=True)
    file = io.BytesIO()
    Image.new("1", (SIDE, SIDE)).save(file, "PPM")
    yield "PBM", file.getvalue()
    yield "PBM with a remark in a number", file.getvalue().replace(b"3000 ", b"3#\n000 ", 1)
    large = png(SIDE, SIDE)
    yield "large PNG in an icon", icon(large)
    yield "PNG in an ICNS", apple_icon(png(1024, 1024))
    yield "JPEG in a BLP", texture(saved("JPEG", 1024))
    hidden = large[:8] + chunk(b"prVt", struct.pack(">II", 16, 16)) + large[8:]
    yield "PNG in an icon, a chunk before its size", icon(hidden)
    yield (
        "GIF whose frame exceeds its screen",
        (
            b"GIF89a\1\0\1\0\0\0\0,"
            + struct.pack("<HHHHB", 0, 0, SIDE, SIDE, 0)
            + b"\x02\x02L\x01\0;"
        ),
    )
    yield "TIFF of one large tile", tile_of(13_008)
    yield "FLI", fli(b"")
    yield "FLI as PNM", fli(b"P6#a\x11\xaf") + b"\n1 1 255\n\0\0\0"
    yield "FLI as TIFF", fli(b"II*\0\x11\xaf\0\0")
    yield "TGA", run_length_tga(b"\0\0\x0a" + bytes(9))
    yield "TGA as HEIC", disguised_tga()
    yield "large AVIF", saved("AVIF", 1100, speed=10)
    avif = bytearray(saved("AVIF", speed=10))
    place = avif.index(b"ispe") + 8
    assert avif[place : place + 8] == struct.pack(">II", SIDE, SIDE)
    avif[place : place + 8] = struct.pack(">II", 16, 16)
    yield "AVIF, 16 × 16 in its boxes", bytes(avif)
    yield "cut AVIF", saved("AVIF", 64)[:-20]
    yield "QOI", saved("QOI", 500)
    yield "DDS without pixels", saved("DDS", 300)[:128]
    bitmap = samples.run_length_bmp(Image.new("L", (64, 64)))
    yield "BMP of ends of lines", bitmap[: 54 + 1024] + b"\0\0" * 100_000
    frame = b"\xff\xc0\0\x0b\x08\0\1\0\1\1\1\x11\0\xff\xda\0\0"
    yield "JPEG of junk between markers", b"\xff\xd8\xff\xe0\0\2" + bytes(650_000) + frame
    yield "JPEG of fill bytes", b"\xff\xd8\xff\xe0\0\2" + b"\xff" * 650_000 + frame[1:]
    yield "GIF of junk", b"GIF89a\1\0\1\0\0\0\0" + b"\1" * 65_000 + b",\0\0\0\0\1\0\1\0\0"
    extension = b"!\xfe" + b"\x01x" * 100_000 + b"\0"
    yield "GIF of short blocks", b"GIF89a\1\0\1\0\0\0\0" + extension + b",\0\0\0\0\1\0\1\0\0"
    empty = chunk(b"prVt", b"") * 60_000
    yield "PNG of empty chunks", png(1, 1, chunks=empty)
    entry = struct.pack("<BBBBHHII", 1, 1, 0, 0, 0, 0, 0, 6 + 16 * 60_000)
    yield "icon of many entries", b"\0\0\1\0" + struct.pack("<H", 60_000) + entry * 60_000
    yield "TIFF of many tags", tiff(*[(256, 3, 1), (257, 3, 1)] * 30_000)
    yield "text", b"no picture at all"
    yield "nothing", b""
    yield "cut PNG", png(1, 1)[:30]


def film(suffix: str, codec: str, *, side: int = 640, frames: int = 8, fps: float = 8) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"film{suffix}"
        out = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), fps, (side, side))
        for _ in range(frames):
            out.write(np.zeros((side, side, 3), np.uint8))
        out.release()
        return path.read_bytes()


def disguised(data: bytes) -> bytes:
    """Return an MP4 whose boxes say 16 × 16."""
    found = bytearray(data)
    header, entry = found.find(b"tkhd"), found.find(b"mp4v", found.find(b"stsd"))
    found[header + 80 : header + 88] = struct.pack(">II", 16 << 16, 16 << 16)
    found[entry + 28 : entry + 32] = struct.pack(">HH", 16, 16)
    return bytes(found)


def without_scale(data: bytes) -> bytes:
    """Return a Matroska whose TimestampScale is 0."""
    found = bytearray(data)
    place = found.find(b"\x2a\xd7\xb1")
    length = found[place + 3] & 0x7F
    found[place + 4 : place + 4 + length] = bytes(length)
    return bytes(found)


def films() -> Iterator[tuple[str, bytes]]:
    large = film(".mp4", "mp4v", side=1600)
    yield "large MP4", large
    yield "large MP4, 16 × 16 in its boxes", disguised(large)
    yield "large Motion JPEG", film(".avi", "MJPG", side=1600)
    yield "MP4 of more pixels than a request", film(".mp4", "mp4v", side=900, frames=8)
    yield "MP4, 16 × 16 in its boxes", disguised(film(".mp4", "mp4v", side=900, frames=8))
    yield "Matroska without a scale of time", without_scale(film(".mkv", "mp4v", side=900))
    yield "MP4 that plays too long", film(".mp4", "mp4v", side=64, frames=30, fps=1)
    yield "MP4 of too many frames", film(".mp4", "mp4v", side=16, frames=700, fps=100)
    yield "no film", b"no film at all"


FRAME = base64.b64encode(png(1, 1)).decode()
LISTS = {"list of too many frames": [FRAME] * 601, "list with a large frame": [FRAME, "LARGE"]}


def clips() -> Iterator[tuple[str, bytes]]:
    for rate in (1000, 8000):
        file = io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setparams((1, 2, rate, 0, "NONE", ""))
            out.writeframes(bytes(2 * rate * 30))
        yield f"30 s of sound at {rate} Hz", file.getvalue()


def peak_mib() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (each for each in status if each.startswith("VmHWM"))
    return int(line.split()[1]) >> 10


def main() -> None:
    """Load everything, and print what each file cost."""
    made = [
        *(("image", *each) for each in pictures()),
        *(("video", *each) for each in films()),
        *(("audio", *each) for each in clips()),
    ]
    media_bounds.bound_process(SMALL)
    for name, frames in LISTS.items():
        large = base64.b64encode(png(SIDE, SIDE)).decode()
        frames = [frame.replace("LARGE", large) for frame in frames]
        load("video", name, ",".join(frames), media_type="video/jpeg")
    good = [("image", "good PNG", png(1000, 1000)), ("video", "good MP4", film(".mp4", "mp4v"))]
    for modality, name, data in [good[0], *made, *good]:
        load(modality, name, data)
    contextvars.copy_context().run(load_icons)
    os.environ["VLLM_MAX_IMAGE_PIXELS"] = str(64 << 20)
    media_bounds.bound_process(MediaSection(max_memory_bytes=64 << 20))
    # Twice the memory: as much as half of it may be left of the files before.
    load("image", "more than there is memory for", png(8000, 8000, bits=16))
    load("image", "good PNG at last", png(1000, 1000))


def load_icons() -> None:
    """Load two icons in one request, the first of which has more pixels than it may have."""

    media_bounds.begin_request(MediaSection(max_request_pixels=10))
    for name in ("first icon of a request", "second icon of a request"):
        load("image", name, icon(png(1000, 1000)))


def load(modality: str, name: str, data: bytes | str, *, media_type: str = "") -> None:
    connector = MEDIA_CONNECTOR_REGISTRY.load("http")
    fetch = getattr(connector, f"fetch_{modality}")
    text = data if isinstance(data, str) else base64.b64encode(data).decode()
    url = f"data:{media_type or f'{modality}/x'};base64,{text}"
    Path("/proc/self/clear_refs").write_text("5")
    before, begun = peak_mib(), time.process_time()
    outcome = "loaded"
    try:
        fetch(url)
    except ValueError as error:
        outcome = f"refused: {error}"
    found = {"outcome": outcome, "cpu_ms": 1000 * (time.process_time() - begun)}
    print(json.dumps({"name": name, **found, "peak_mib": peak_mib() - before}))


if __name__ == "__main__":
    main()
