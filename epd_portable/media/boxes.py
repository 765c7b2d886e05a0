"""What files of nested boxes hold: MP4, MOV and 3GP; AVIF and HEIF; JPEG 2000.

Sources: ISO/IEC 14496-12 (boxes, tracks and fragments), 23008-12 (properties of items), 15444-1
(code streams and their file format).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from epd_portable.errors import MediaError
from epd_portable.media.base64_view import Base64View
from epd_portable.media.extent import Extent, picture

_CONTAINERS = frozenset(
    {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"mvex", b"moof", b"traf", b"iprp", b"ipco"}
)
_DEEPEST = 8

_PICTURES = frozenset({b"vide", b"pict", b"auxv"})
"""Tracks of videos, and those of animated pictures."""

_HAS_BASE, _HAS_DESCRIPTION, _HAS_DURATION = 0x1, 0x2, 0x8
_RUN_HAS_OFFSET, _RUN_HAS_FIRST_FLAGS = 0x1, 0x4
_SAMPLE_HAS_DURATION = 0x100
_SAMPLE_FIELDS = (_SAMPLE_HAS_DURATION, 0x200, 0x400, 0x800)


def boxes(view: Base64View, begin: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, begin and end of the content of each box in a range.

    Raises:
        MediaError: One is shorter than its own header, or there are too many.
    """
    at = begin
    while at + 8 <= end:
        view.step()
        length, name, header = view.number(at, 4), view.read(at + 4, 4), 8
        if length == 1:
            length, header = view.number(at + 8, 8), 16
        elif length == 0:
            length = end - at
        if length < header:
            raise MediaError(f"box {name!r} at byte {at} has {length} bytes: it needs {header}")
        yield name, at + header, min(at + length, end)
        at += length


class _Track:
    """What boxes say of one track."""

    def __init__(self) -> None:
        self.is_video = False
        self.width = self.height = 0
        self.sampled = 0  # by the tables of the whole file
        self.in_fragments = 0
        self.timescale = 0
        self.duration = 0
        self.sample_duration = 0
        self.fragment_begin = 0
        self.fragment_sample_duration = 0

    @property
    def frames(self) -> int:
        return self.sampled + self.in_fragments

    @property
    def seconds(self) -> float:
        return self.duration / self.timescale if self.timescale else 0.0


class _Movie:
    """Takes in boxes in the order of the file."""

    def __init__(self, view: Base64View) -> None:
        self._view = view
        self._tracks: dict[int, _Track] = {}
        self._track = _Track()
        self._fragmented = False
        self.timescale = 0
        self.duration = 0
        self.item_width = self.item_height = 0

    def walk(self, begin: int, end: int, depth: int = 0) -> None:
        if depth > _DEEPEST:
            raise MediaError(f"its boxes are nested more than {_DEEPEST} deep")
        for name, at, stop in boxes(self._view, begin, end):
            if name == b"trak":
                self._track = _Track()
            if name in _CONTAINERS:
                self.walk(at, stop, depth + 1)
            elif name == b"meta" and depth == 0:
                self.walk(at + 4, stop, depth + 1)
            elif name == b"cmov":
                raise MediaError("its headers are compressed: write the file anew without that")
            else:
                self._take(name, at, stop)

    def extent(self, *, of_items: bool) -> Extent:
        tracks = list(self._tracks.values())
        videos = [track for track in tracks if track.is_video]
        width = max([track.width for track in videos], default=0)
        height = max([track.height for track in videos], default=0)
        frames = max([track.frames for track in videos], default=0)
        seconds = max([track.seconds for track in tracks], default=0.0)
        if self.timescale:
            seconds = max(seconds, self.duration / self.timescale)
        if of_items:
            width, height = max(width, self.item_width), max(height, self.item_height)
            return picture(width, height, frames=frames, seconds=seconds)
        if not tracks:
            raise MediaError("it has no track, or ends before it tells of one: send the whole file")
        return Extent(width=width, height=height, frames=frames, seconds=seconds)

    def _take(self, name: bytes, at: int, end: int) -> None:
        view, track = self._view, self._track
        if name == b"mvhd":
            self.timescale, self.duration = self._times(at)
        elif name == b"tkhd":
            wide = view.number(at, 1) == 1
            self._tracks[view.number(at + (20 if wide else 12), 4)] = track
            place = at + (88 if wide else 76)
            self._enlarge(view.number(place, 4) >> 16, view.number(place + 4, 4) >> 16)
        elif name == b"mdhd":
            track.timescale, duration = self._times(at)
            track.duration = max(track.duration, duration)
        elif name == b"hdlr":
            track.is_video |= view.read(at + 8, 4) in _PICTURES
        elif name == b"stsd" and track.is_video:
            for _, entry, _ in boxes(view, at + 8, end):
                self._enlarge(view.number(entry + 24, 2), view.number(entry + 26, 2))
        elif name == b"stts":
            self._take_times(at)
        elif name in (b"stsz", b"stz2"):
            track.sampled = max(track.sampled, view.number(at + 8, 4))
        elif name == b"ispe":
            self.item_width = max(self.item_width, view.number(at + 4, 4))
            self.item_height = max(self.item_height, view.number(at + 8, 4))
        elif name in (b"mehd", b"trex", b"tfhd", b"tfdt", b"trun"):
            self._take_fragment(name, at)

    def _take_fragment(self, name: bytes, at: int) -> None:
        view = self._view
        version, flags = view.number(at, 1), view.number(at + 1, 3)
        if name == b"mehd":
            self.duration = max(self.duration, view.number(at + 4, 8 if version == 1 else 4))
        elif name == b"trex":
            self._at(view.number(at + 4, 4)).sample_duration = view.number(at + 12, 4)
        elif name == b"tfhd":
            self._track = track = self._at(view.number(at + 4, 4))
            track.fragment_sample_duration = track.sample_duration
            if flags & _HAS_DURATION:
                place = at + 8
                place += 8 if flags & _HAS_BASE else 0
                place += 4 if flags & _HAS_DESCRIPTION else 0
                track.fragment_sample_duration = view.number(place, 4)
        elif name == b"tfdt":
            self._track.fragment_begin = view.number(at + 4, 8 if version == 1 else 4)
        else:
            self._take_run(at, flags)

    def _take_run(self, at: int, flags: int) -> None:
        track, count = self._track, self._view.number(at + 4, 4)
        track.in_fragments += count
        duration = count * track.fragment_sample_duration
        if flags & _SAMPLE_HAS_DURATION:
            begin = at + 8
            begin += 4 if flags & _RUN_HAS_OFFSET else 0
            begin += 4 if flags & _RUN_HAS_FIRST_FLAGS else 0
            fields = sum(bool(flags & field) for field in _SAMPLE_FIELDS)
            duration = sum(self._table(begin, count, fields)[::fields])
        track.fragment_begin += duration
        track.duration = max(track.duration, track.fragment_begin)

    def _take_times(self, at: int) -> None:
        """Read how long samples last: pairs of a number of samples and the time of each."""
        values = self._table(at + 8, self._view.number(at + 4, 4), 2)
        numbers, durations = values[::2], values[1::2]
        track = self._track
        track.sampled = max(track.sampled, sum(numbers))
        total = sum(number * time for number, time in zip(numbers, durations, strict=True))
        track.duration = max(track.duration, total)

    def _table(self, at: int, count: int, fields: int) -> tuple[int, ...]:
        self._view.step(count)
        return struct.unpack(f">{count * fields}I", self._view.read(at, 4 * count * fields))

    def _at(self, number: int) -> _Track:
        return self._tracks.setdefault(number, _Track())

    def _enlarge(self, width: int, height: int) -> None:
        self._track.width = max(self._track.width, width)
        self._track.height = max(self._track.height, height)

    def _times(self, at: int) -> tuple[int, int]:
        """Return time scale and duration of a movie's or a track's header."""
        view = self._view
        if view.number(at, 1) == 1:
            scale, duration, unknown = view.number(at + 20, 4), view.number(at + 24, 8), 2**64 - 1
        else:
            scale, duration, unknown = view.number(at + 12, 4), view.number(at + 16, 4), 2**32 - 1
        return scale, 0 if duration == unknown else duration


def movie(view: Base64View, count_frames: bool) -> Extent:
    """Read MP4, MOV and their kin, whole or in fragments."""
    found = _Movie(view)
    found.walk(0, view.size)
    return found.extent(of_items=False)


def items(view: Base64View, count_frames: bool) -> Extent:
    """Read AVIF and HEIF: the largest picture in it, be it a whole, a tile or a preview."""
    found = _Movie(view)
    found.walk(0, view.size)
    return found.extent(of_items=True)


def jpeg_2000(view: Base64View, count_frames: bool) -> Extent:
    """Read JPEG 2000 in its file format: the larger of what the file and the code stream say."""
    width = height = 0
    for name, at, end in boxes(view, 0, view.size):
        if name == b"jp2h":
            for inner, place, _ in boxes(view, at, end):
                if inner == b"ihdr":
                    height = max(height, view.number(place, 4))
                    width = max(width, view.number(place + 4, 4))
        elif name == b"jp2c":
            wide, high = _code_stream_size(view, at)
            width, height = max(width, wide), max(height, high)
    return picture(width, height)


def code_stream(view: Base64View, count_frames: bool) -> Extent:
    """Read a code stream of JPEG 2000 without a file around it."""
    return picture(*_code_stream_size(view, 0))


def _code_stream_size(view: Base64View, at: int) -> tuple[int, int]:
    if view.read(at, 4) != b"\xff\x4f\xff\x51":
        raise MediaError("its code stream does not begin with its size")
    right, bottom, left, top = struct.unpack(">4I", view.read(at + 8, 16))
    return right - left, bottom - top
