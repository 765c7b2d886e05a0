"""What files of chunks hold: WAV, AVI and WebP.

Sources: Microsoft's RIFF, its 64-bit form (EBU Tech 3306), AVI's headers, and the container
specification and bit streams of WebP (RFC 9649).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from epd_portable.errors import MediaError
from epd_portable.media.base64_view import Base64View
from epd_portable.media.extent import Extent, picture, seconds_of

_HEADER_BYTES = 12
_PLAIN = frozenset({1, 3, 6, 7, 0xFFFE})
"""Formats of WAV in which each sample takes the same number of bytes."""
_UNTIL_THE_END = 0xFFFF_FFFF


def chunks(view: Base64View, begin: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, begin and end of the content of each chunk in a range.

    Raises:
        MediaError: There are too many.
    """
    at = begin
    while at + 8 <= end:
        view.step()
        length = view.little(at + 4, 4)
        yield view.read(at, 4), at + 8, min(at + 8 + length, end)
        at += 8 + length + length % 2


def wav(view: Base64View, count_frames: bool) -> Extent:
    """Read WAV: its length by the bytes that are there, whatever is written."""
    sound: tuple[int, ...] | None = None
    samples = nbytes = 0
    for name, at, end in chunks(view, _HEADER_BYTES, view.size):
        if name == b"fmt ":
            sound = struct.unpack("<HHIIHH", view.read(at, 16))
        elif name == b"fact" and end - at >= 4:
            samples = view.little(at, 4)
        elif name == b"data":
            written = view.little(at - 4, 4)
            if written in (0, _UNTIL_THE_END):
                # Written as a stream, or its length is in another chunk.
                end = view.size
            nbytes += end - at
            if end == view.size:
                break
    if sound is None:
        raise MediaError("it has no chunk 'fmt ' before its data: send the whole file")
    kind, channels, rate, bytes_per_s, block_bytes, bits = sound
    if kind in _PLAIN:
        sizes = [size for size in (block_bytes, channels * bits // 8) if size]
        return Extent(seconds=seconds_of(nbytes // min(sizes, default=1), rate))
    return Extent(seconds=max(nbytes / max(bytes_per_s, 1), seconds_of(samples, rate)))


def avi(view: Base64View, count_frames: bool) -> Extent:
    """Read AVI."""
    found = _Avi(view)
    for name, at, end in chunks(view, _HEADER_BYTES, view.size):
        if name == b"LIST" and view.read(at, 4) == b"hdrl":
            found.walk(at + 4, end)
            break
    return Extent(
        width=found.width, height=found.height, frames=found.frames, seconds=found.seconds
    )


class _Avi:
    def __init__(self, view: Base64View) -> None:
        self._view = view
        self._is_video = False
        self.width = self.height = self.frames = 0
        self.seconds = 0.0

    def walk(self, begin: int, end: int) -> None:
        view = self._view
        for name, at, stop in chunks(view, begin, end):
            if name == b"LIST" and view.read(at, 4) == b"strl":
                for inner, place, _ in chunks(view, at + 4, stop):
                    self._take(inner, place)
            else:
                self._take(name, at)

    def _take(self, name: bytes, at: int) -> None:
        view = self._view
        if name == b"avih":
            frame_us, frames = view.little(at, 4), view.little(at + 16, 4)
            self.frames = max(self.frames, frames)
            self.seconds = max(self.seconds, frames * frame_us / 1e6)
            self._enlarge(view.little(at + 32, 4), view.little(at + 36, 4))
        elif name == b"strh":
            scale, rate, _, length = struct.unpack("<IIII", view.read(at + 20, 16))
            self._is_video = view.read(at, 4) == b"vids"
            if self._is_video:
                self.frames = max(self.frames, length)
            if rate:
                self.seconds = max(self.seconds, length * scale / rate)
        elif name == b"strf" and self._is_video:
            width, height = struct.unpack("<ii", view.read(at + 4, 8))
            self._enlarge(abs(width), abs(height))

    def _enlarge(self, width: int, height: int) -> None:
        self.width, self.height = max(self.width, width), max(self.height, height)


def webp(view: Base64View, count_frames: bool) -> Extent:
    """Read WebP and its animations."""
    width = height = frames = 0
    for name, at, _ in chunks(view, _HEADER_BYTES, view.size):
        wide = high = 0
        if name == b"VP8X":
            wide, high = 1 + view.little(at + 4, 3), 1 + view.little(at + 7, 3)
        elif name == b"VP8L":
            bits = view.little(at + 1, 4)
            wide, high = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        elif name == b"VP8 ":
            wide, high = view.little(at + 6, 2) & 0x3FFF, view.little(at + 8, 2) & 0x3FFF
        elif name == b"ANMF":
            frames += 1
            wide, high = 1 + view.little(at + 6, 3), 1 + view.little(at + 9, 3)
        width, height = max(width, wide), max(height, high)
        if not count_frames and name in (b"VP8 ", b"VP8L", b"ANMF"):
            break
    return picture(width, height, frames=frames)
