"""How large still pictures and animations are: PNG, JPEG, GIF, BMP, ICO, TIFF and PNM.

Where a header can be there twice, the larger size counts, whichever the decoder takes.

Sources: W3C PNG (third edition), ITU T.81, GIF89a, TIFF 6.0 and its 64-bit extension, CIPA DC-007
(several pictures in one JPEG), netpbm's file formats, and the bitmap headers of the Windows API.
"""

from __future__ import annotations

import re
import struct

from epd_portable.errors import MediaError
from epd_portable.media.base64_view import Base64View
from epd_portable.media.extent import Extent, picture

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

_SIZES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""Markers of JPEG's frame headers."""
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers of JPEG without a length."""
_NUMBER_OF_PICTURES = 0xB001
_IMAGE_WIDTH, _IMAGE_LENGTH = 256, 257
_INTEGERS = {1: 1, 3: 2, 4: 4, 16: 8}
"""Bytes of TIFF's types of unsigned integers."""
_NETPBM = re.compile(
    rb"P[1-6]" + 2 * rb"(?:[ \t\n\r\v\f]|#[^\n\r]*[\n\r])+([0-9]{1,9})" + rb"[ \t\n\r\v\f#]"
)
_NETPBM_HEADER_BYTES = 1024


def png(view: Base64View, count_frames: bool) -> Extent:
    """Read PNG and its animations."""
    width = height = 0
    frames, at = 1, len(PNG_SIGNATURE)
    while True:
        view.step()
        length, kind = view.number(at, 4), view.read(at + 4, 4)
        if kind == b"IHDR":
            width, height = max(width, view.number(at + 8, 4)), max(height, view.number(at + 12, 4))
        elif kind == b"acTL":
            frames = max(frames, view.number(at + 8, 4))
        elif kind in (b"IDAT", b"IEND"):
            return picture(width, height, frames=frames)
        at += 12 + length


def jpeg(view: Base64View, count_frames: bool) -> Extent:
    """Read JPEG; several in one file by the index in the first."""
    width = height = 0
    frames, at = 1, 2
    while True:
        view.step()
        if view.number(at, 1) != 0xFF:
            # Decoders go on to the next marker.
            at += 1
            continue
        marker = view.number(at + 1, 1)
        if marker == 0xFF:
            at += 1
        elif marker == 0 or marker in _ALONE:
            at += 2
        elif marker in (0xD9, 0xDA):
            return picture(width, height, frames=frames)
        else:
            length = view.number(at + 2, 2)
            if marker in _SIZES:
                height = max(height, view.number(at + 5, 2))
                width = max(width, view.number(at + 7, 2))
            elif marker == 0xE2 and length >= 16 and view.read(at + 4, 4) == b"MPF\0":
                frames = max(frames, _pictures_in_index(view, at + 8))
            at += 2 + max(length, 2)


def _pictures_in_index(view: Base64View, begin: int) -> int:
    order = _byte_order(view, begin)
    at = begin + _uint(view, begin + 4, 4, order)
    for entry in range(_uint(view, at, 2, order)):
        view.step()
        if _uint(view, at + 2 + 12 * entry, 2, order) == _NUMBER_OF_PICTURES:
            return _uint(view, at + 10 + 12 * entry, 4, order)
    return 1


def gif(view: Base64View, count_frames: bool) -> Extent:
    """Read GIF. Its first frame may be larger than its screen, and makes it so."""
    width, height, flags = view.little(6, 2), view.little(8, 2), view.number(10, 1)
    frames, at = 0, 13 + _palette_bytes(flags)
    while at < view.size and (count_frames or not frames):
        view.step()
        kind = view.number(at, 1)
        if kind == 0x3B:
            break
        if kind == 0x2C:
            left, top, wide, high, flags = struct.unpack("<HHHHB", view.read(at + 1, 9))
            width, height = max(width, left + wide), max(height, top + high)
            frames += 1
            if count_frames:
                at = _after_blocks(view, at + 11 + _palette_bytes(flags))
        elif kind == 0x21:
            at = _after_blocks(view, at + 2)
        else:
            at += 1
    if not frames:
        raise MediaError("it holds no picture: send the whole file")
    return picture(width, height, frames=frames)


def _palette_bytes(flags: int) -> int:
    return 6 << (flags & 7) if flags & 0x80 else 0


def _after_blocks(view: Base64View, at: int) -> int:
    while length := view.number(at, 1):
        view.step()
        at += 1 + length
    return at + 1


def bmp(view: Base64View, count_frames: bool) -> Extent:
    """Read BMP."""
    return picture(*_bitmap_size(view, 14))


def _bitmap_size(view: Base64View, at: int) -> tuple[int, int]:
    length = view.little(at, 4)
    if length == 12:
        return view.little(at + 4, 2), view.little(at + 6, 2)
    if length < 16:
        raise MediaError(f"its bitmap header has {length} bytes: there is none shorter than 12")
    width, height = struct.unpack("<ii", view.read(at + 4, 8))
    # A negative height says in which order rows come.
    return abs(width), abs(height)


def ico(view: Base64View, count_frames: bool) -> Extent:
    """Read ICO and CUR: decoders take one of the pictures in it, the largest as a rule."""
    width = height = 0
    for entry in range(view.little(4, 2)):
        view.step()
        wide, high, offset = struct.unpack("<BB10xI", view.read(6 + 16 * entry, 16))
        width, height = max(width, wide or 256), max(height, high or 256)
        if view.read(offset, 8) == PNG_SIGNATURE:
            wide, high = view.number(offset + 16, 4), view.number(offset + 20, 4)
        else:
            wide, twice = _bitmap_size(view, offset)
            high = twice // 2
        width, height = max(width, wide), max(height, high)
    return picture(width, height)


def tiff(view: Base64View, count_frames: bool) -> Extent:
    """Read TIFF: its first page, or all of them."""
    order = _byte_order(view, 0)
    is_big = _uint(view, 2, 2, order) == 43
    offset_bytes, count_bytes, entry_bytes = (8, 8, 20) if is_big else (4, 2, 12)
    offset = _uint(view, 8 if is_big else 4, offset_bytes, order)
    width = height = 0
    pages: set[int] = set()
    while offset and (count_frames or not pages):
        if offset in pages:
            raise MediaError("its pages go round in a circle: send a file that ends")
        pages.add(offset)
        count = _uint(view, offset, count_bytes, order)
        view.step(1 + count)
        begin, end = offset + count_bytes, offset + count_bytes + count * entry_bytes
        for at in range(begin, end, entry_bytes):
            tag = _uint(view, at, 2, order)
            if tag == _IMAGE_WIDTH:
                width = max(width, _tag_value(view, at, count_bytes, order))
            elif tag == _IMAGE_LENGTH:
                height = max(height, _tag_value(view, at, count_bytes, order))
        if count_frames:
            offset = _uint(view, end, offset_bytes, order)
    return picture(width, height, frames=len(pages))


def _tag_value(view: Base64View, at: int, count_bytes: int, order: str) -> int:
    kind = _uint(view, at + 2, 2, order)
    # Entries of the 64-bit form count with eight bytes, those of the other with four.
    many_bytes = 8 if count_bytes == 8 else 4
    if kind not in _INTEGERS or _uint(view, at + 4, many_bytes, order) != 1:
        raise MediaError("the size of one of its pages is no single integer")
    return _uint(view, at + 4 + many_bytes, _INTEGERS[kind], order)


def _byte_order(view: Base64View, at: int) -> str:
    found = {b"II": "<", b"MM": ">"}.get(view.read(at, 2))
    if found is None:
        raise MediaError("its directory begins with neither II nor MM")
    return found


def _uint(view: Base64View, at: int, count: int, order: str) -> int:
    return view.little(at, count) if order == "<" else view.number(at, count)


def netpbm(view: Base64View, count_frames: bool) -> Extent:
    """Read PBM, PGM and PPM."""
    head = view.read(0, min(view.size, _NETPBM_HEADER_BYTES))
    found = _NETPBM.match(head)
    # One line with a colon would be the first of an IM file, too, which some decoders try before.
    if found is None or b":" in head.partition(b"\n")[0]:
        raise MediaError(
            f"the first {_NETPBM_HEADER_BYTES} bytes do not tell width and height in digits: write "
            "them, and the largest value, on lines of their own"
        )
    return picture(int(found[1]), int(found[2]))
