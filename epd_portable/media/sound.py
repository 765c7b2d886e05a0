"""How long clips of sound play: FLAC, OGG and MP3, which are not files of chunks as WAV is.

Sources: RFC 9639 (FLAC), RFC 3533 and 7845 (Ogg, Opus), Vorbis I, ISO/IEC 11172-3 and 13818-3,
and the headers by which encoders write how many frames a file has.
"""

from __future__ import annotations

import struct

from epd_portable.errors import MediaError
from epd_portable.media.base64_view import Base64View
from epd_portable.media.extent import Extent, seconds_of

_TAGS = 4
"""Tags before the sound that are looked over."""
_SEARCHED_BYTES = 4096
"""In which the first frame of an MP3 file begins."""
_MOST_BITS_PER_S = 448_000
_PAGE_BYTES = 27
_LARGEST_PAGE_BYTES = 65_307
_OPUS_RATE = 48_000
_MOST_STREAMS = 64

_RATES = (44_100, 48_000, 32_000)
# By version (1, then 2 and 2.5) and layer; kilobits a second of the fourteen indices.
_KILOBITS = {
    (1, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (2, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}


def after_tags(view: Base64View) -> int:
    """Return where a file begins behind its ID3 tags.

    Raises:
        MediaError: It has nothing but tags, or too many.
    """
    at = 0
    for _ in range(_TAGS):
        head = view.read(at, min(10, view.size - at))
        if head[:3] != b"ID3":
            return at
        view.step()
        flags = head[5]
        length = (
            (head[6] & 127) << 21 | (head[7] & 127) << 14 | (head[8] & 127) << 7 | head[9] & 127
        )
        at += 10 + length + (10 if flags & 0x10 else 0)
        if at >= view.size:
            break
    raise MediaError(f"it holds nothing in its first {at} bytes but tags: send the whole file")


def flac(view: Base64View, count_frames: bool) -> Extent:
    """Read FLAC; where no length is written, the longest that its bytes allow."""
    at = after_tags(view) + 8
    largest_block, smallest_frame = view.number(at + 2, 2), view.number(at + 4, 3)
    bits = view.number(at + 10, 8)
    rate, samples = bits >> 44, bits & ((1 << 36) - 1)
    if not samples:
        if not smallest_frame:
            raise MediaError("it does not tell how long it is: write the file anew")
        samples = view.size // smallest_frame * largest_block
    return Extent(seconds=seconds_of(samples, rate))


def ogg(view: Base64View, count_frames: bool) -> Extent:
    """Read OGG with Vorbis, Opus, FLAC or Speex."""
    streams: dict[int, tuple[int, int]] = {}
    at = 0
    while len(streams) < _MOST_STREAMS:
        view.step()
        head = view.read(at, _PAGE_BYTES)
        if head[:4] != b"OggS" or not head[5] & 2:
            break
        segments = head[26]
        body = at + _PAGE_BYTES + segments
        streams[int.from_bytes(head[14:18], "little")] = _ogg_stream(view, body)
        at = body + sum(view.read(at + _PAGE_BYTES, segments))
    tail_begin = max(0, view.size - _LARGEST_PAGE_BYTES)
    tail = view.read(tail_begin, view.size - tail_begin)
    page = len(tail)
    while (page := tail.rfind(b"OggS", 0, page)) >= 0:
        view.step()
        if page + _PAGE_BYTES > len(tail):
            continue
        granule, serial = struct.unpack("<qI", tail[page + 6 : page + 18])
        if serial not in streams:
            raise MediaError("it is several files in one: send them one by one")
        if granule >= 0:
            rate, skipped = streams[serial]
            return Extent(seconds=seconds_of(max(0, granule - skipped), rate))
    raise MediaError("it does not tell how long it is: send the whole file")


def _ogg_stream(view: Base64View, at: int) -> tuple[int, int]:
    """Return rate and skipped samples of a stream of sound."""
    head = view.read(at, min(8, view.size - at))
    if head[:7] == b"\x01vorbis":
        return view.little(at + 12, 4), 0
    if head == b"OpusHead":
        return _OPUS_RATE, view.little(at + 10, 2)
    if head[:5] == b"\x7fFLAC":
        return view.number(at + 27, 8) >> 44, 0
    if head == b"Speex   ":
        return view.little(at + 36, 4), 0
    raise MediaError(f"it holds {head!r}, and of OGG only Vorbis, Opus, FLAC and Speex are known")


def mp3(view: Base64View, count_frames: bool) -> Extent:
    """Read MP3: frames by the encoder's own header, or by the first frame's bits a second.

    It is never shorter than its bytes at the highest number of bits a second.
    """
    begin = after_tags(view)
    searched = view.read(begin, min(_SEARCHED_BYTES, view.size - begin))
    at = begin + _first_frame(searched)
    second, third, fourth = view.read(at + 1, 3)
    version = second >> 3 & 3
    layer = 4 - (second >> 1 & 3)
    generation = 1 if version == 3 else 2
    rate = _RATES[third >> 2 & 3] >> {3: 0, 2: 1, 0: 2}[version]
    samples = 384 if layer == 1 else 576 if layer == 3 and generation == 2 else 1152
    nbytes = view.size - at
    bits_per_s = 1000 * _KILOBITS[generation, layer][(third >> 4) - 1]
    least_s = 8 * nbytes / _MOST_BITS_PER_S
    is_mono = fourth >> 6 == 3
    side_bytes = (17 if is_mono else 32) if generation == 1 else (9 if is_mono else 17)
    for place, name, flag, number in (
        (at + 4 + side_bytes, (b"Xing", b"Info"), 4, 8),
        (at + 36, (b"VBRI",), None, 14),
    ):
        if place + 18 > view.size or view.read(place, 4) not in name:
            continue
        if flag is None or view.number(place + flag, 4) & 1:
            frames = view.number(place + number, 4)
            return Extent(seconds=max(least_s, seconds_of(frames * samples, rate)))
    return Extent(seconds=8 * nbytes / bits_per_s)


def _first_frame(head: bytes) -> int:
    at = -1
    while (at := head.find(b"\xff", at + 1)) >= 0 and at + 4 <= len(head):
        second, third = head[at + 1], head[at + 2]
        is_frame = second >= 0xE0 and second >> 3 & 3 != 1 and second >> 1 & 3
        if is_frame and third >> 4 not in (0, 15) and third >> 2 & 3 != 3:
            return at
    raise MediaError(f"no frame begins within {_SEARCHED_BYTES} bytes: send the whole file")
