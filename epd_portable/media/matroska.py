"""What Matroska and WebM files hold.

Sources: RFC 8794 (EBML) and RFC 9559 (Matroska).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

from epd_portable.errors import MediaError
from epd_portable.media.base64_view import Base64View
from epd_portable.media.extent import Extent

FRAMES_PER_S = 60
"""Of a video that does not tell the time of a frame."""

_SEGMENT, _INFO, _TRACKS, _CLUSTER = 0x18538067, 0x1549A966, 0x1654AE6B, 0x1F43B675
_TIMESTAMP_SCALE, _DURATION = 0x2AD7B1, 0x4489
_TRACK, _TRACK_TYPE, _DEFAULT_DURATION = 0xAE, 0x83, 0x23E383
_VIDEO, _WIDTH, _HEIGHT = 0xE0, 0xB0, 0xBA
_TIMESTAMP, _SIMPLE_BLOCK, _BLOCK_GROUP, _BLOCK = 0xE7, 0xA3, 0xA0, 0xA1
_VIDEO_TYPE = 1
_LONGEST_S = 1e12


def element(view: Base64View, at: int, end: int) -> tuple[int, int, int | None]:
    """Return name, begin and end of the content of the element at a place.

    Its end is ``None`` where its length is written as unknown.

    Raises:
        MediaError: There is none, or there were too many.
    """
    view.step()
    name, name_bytes = _variable(view, at, keep_marker=True)
    length, length_bytes = _variable(view, at + name_bytes, keep_marker=False)
    content = at + name_bytes + length_bytes
    if length == (1 << 7 * length_bytes) - 1:
        return name, content, None
    return name, content, min(content + length, end)


def elements(view: Base64View, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield name, begin and end of the content of each element in a range.

    Raises:
        MediaError: One is broken, or there are too many.
    """
    at = begin
    while at < end:
        name, content, known = element(view, at, end)
        at = end if known is None else known
        yield name, content, at


def _variable(view: Base64View, at: int, *, keep_marker: bool) -> tuple[int, int]:
    """Return an integer of variable length, and how many bytes it takes."""
    nbytes = 9 - view.number(at, 1).bit_length()
    if nbytes > (4 if keep_marker else 8):
        raise MediaError(f"no element begins at byte {at}")
    value = view.number(at, nbytes)
    return value if keep_marker else value & ((1 << 7 * nbytes) - 1), nbytes


class _Segment:
    """What is found in a file, until its length and its tracks are known."""

    def __init__(self, view: Base64View) -> None:
        self._view = view
        self._scale_ns = 1_000_000
        self._ticks = 0.0  # of the whole, where that is written
        self._last_tick = 0
        self._frame_ns = 0
        self._has_tracks = False
        self._width = self._height = 0

    def walk(self, begin: int) -> None:
        view, at, cluster_tick = self._view, begin, 0
        while at < view.size and not (self._ticks and self._has_tracks):
            name, content, end = element(view, at, view.size)
            if name in (_SEGMENT, _CLUSTER):
                # Many a recording that was sent while it was made knows the length of neither.
                at = content
                continue
            at = view.size if end is None else end
            if name == _INFO:
                self._read_info(content, at)
            elif name == _TRACKS:
                self._read_tracks(content, at)
            elif name == _TIMESTAMP:
                cluster_tick = self._integer(content, at)
                self._last_tick = max(self._last_tick, cluster_tick)
            elif name == _SIMPLE_BLOCK:
                self._note(cluster_tick, content)
            elif name == _BLOCK_GROUP:
                for inner, place, _ in elements(view, content, at):
                    if inner == _BLOCK:
                        self._note(cluster_tick, place)

    def extent(self) -> Extent:
        if not self._has_tracks:
            raise MediaError("it has no track, or ends before it tells of one: send the whole file")
        seconds = (self._ticks or self._last_tick) * self._scale_ns / 1e9
        if not 0 <= seconds <= _LONGEST_S:
            raise MediaError(f"its headers say that it plays for {seconds} s")
        frames = 0
        if self._width:
            frame_s = self._frame_ns / 1e9 or 1 / FRAMES_PER_S
            frames = max(1, math.ceil(seconds / frame_s))
        return Extent(width=self._width, height=self._height, frames=frames, seconds=seconds)

    def _read_info(self, begin: int, end: int) -> None:
        for name, at, stop in elements(self._view, begin, end):
            if name == _TIMESTAMP_SCALE:
                self._scale_ns = self._integer(at, stop)
            elif name == _DURATION:
                form = {4: ">f", 8: ">d"}.get(stop - at)
                if form is None:
                    raise MediaError(f"its duration has {stop - at} bytes: it needs 4 or 8")
                (self._ticks,) = struct.unpack(form, self._view.read(at, stop - at))

    def _read_tracks(self, begin: int, end: int) -> None:
        self._has_tracks = True
        for name, at, stop in elements(self._view, begin, end):
            if name == _TRACK:
                self._read_track(at, stop)

    def _read_track(self, begin: int, end: int) -> None:
        kind = frame_ns = 0
        for name, at, stop in elements(self._view, begin, end):
            if name == _TRACK_TYPE:
                kind = self._integer(at, stop)
            elif name == _DEFAULT_DURATION:
                frame_ns = self._integer(at, stop)
            elif name == _VIDEO:
                for inner, place, place_end in elements(self._view, at, stop):
                    if inner == _WIDTH:
                        self._width = max(self._width, self._integer(place, place_end))
                    elif inner == _HEIGHT:
                        self._height = max(self._height, self._integer(place, place_end))
        if kind == _VIDEO_TYPE and frame_ns:
            self._frame_ns = min(self._frame_ns or frame_ns, frame_ns)

    def _note(self, cluster_tick: int, block: int) -> None:
        _, number_bytes = _variable(self._view, block, keep_marker=False)
        (offset,) = struct.unpack(">h", self._view.read(block + number_bytes, 2))
        self._last_tick = max(self._last_tick, cluster_tick + offset)

    def _integer(self, begin: int, end: int) -> int:
        if end - begin > 8:
            raise MediaError(f"an integer at byte {begin} has {end - begin} bytes")
        return self._view.number(begin, end - begin)


def matroska(view: Base64View, count_frames: bool) -> Extent:
    """Read Matroska and WebM; where no length is written, by the times of what is in the file."""
    found = _Segment(view)
    _, _, end = element(view, 0, view.size)
    found.walk(view.size if end is None else end)
    return found.extent()
