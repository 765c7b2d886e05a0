"""Data URLs of images, videos and audio clips: taken apart and checked without decoding. Pure."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from epd_portable.errors import RequestError

Modality = Literal["image", "video", "audio"]
Bytes = bytes | memoryview
"""Views where it matters: every copy of an item costs more than what is looked up in it."""

MAX_HEADER_BYTES = 256
"""Longest ``data:<media type>;base64`` prefix that is looked at."""
FRAMES = "video/jpeg"
"""Media type of a video that is a list of pictures, with commas between their base64 texts."""

_BASE64 = re.compile(rb"[A-Za-z0-9+/]*={0,2}")


class MediaKind(msgspec.Struct, frozen=True, kw_only=True):
    """What may stand in an item's data URL.

    Attributes:
        modality: What the item is to the model.
        families: First halves of the media types that can hold it.
        example: One of these media types.
    """

    modality: Modality
    families: frozenset[str]
    example: str


IMAGE = MediaKind(modality="image", families=frozenset({"image"}), example="image/png")
VIDEO = MediaKind(modality="video", families=frozenset({"video"}), example="video/mp4")
# Of a video, the sound track is taken.
AUDIO = MediaKind(modality="audio", families=frozenset({"audio", "video"}), example="audio/wav")


def split_data_url(url: Bytes, kind: MediaKind, where: str) -> tuple[str, Bytes]:
    """Return media type and base64 text of an item's data URL.

    Args:
        url: The URL, in UTF-8.
        kind: What it must hold.
        where: Its place in the request, for messages.

    Raises:
        RequestError: 400; it is no data URL, not base64, empty, or not of this kind.
    """
    head = bytes(url[:MAX_HEADER_BYTES])
    shown = repr(head[:48].decode("utf-8", "replace")) + ("…" if len(url) > 48 else "")
    place = f"{where}: {shown}"
    if head[:5].lower() != b"data:":
        raise _refusal(
            place,
            f"only data URLs are supported by this version; inline the {kind.modality} as "
            f"data:{kind.example};base64,<base64 of the file>",
            code="unsupported_url",
        )
    comma = head.find(b",")
    if comma < 0:
        raise _refusal(
            place,
            f"the data URL has no ',' before its data; write data:{kind.example};base64,<data>",
        )
    media_type, _, parameters = head[5:comma].decode("ascii", "replace").partition(";")
    media_type = media_type.lower()
    family, _, subtype = media_type.partition("/")
    if family not in kind.families or not subtype:
        raise _refusal(
            place,
            f"media type {media_type!r} is no {kind.modality}; write for example {kind.example}",
        )
    if parameters.rpartition(";")[2] != "base64":
        raise _refusal(place, "the data URL is not base64; write ';base64' before the ','")
    data = url[comma + 1 :]
    if media_type == FRAMES and kind is VIDEO:
        for index, frame in enumerate(bytes(data).split(b",")):
            check_base64(frame, f"{place}: frame {index}")
    else:
        check_base64(data, place)
    return media_type, data


def check_base64(data: Bytes, place: str) -> None:
    """Check that data is there and base64.

    Args:
        data: As it came.
        place: Where it is, for messages.

    Raises:
        RequestError: 400; names the first character that is wrong.
    """
    if not data:
        raise _refusal(place, "it holds no data; give the base64 text of the file")
    found = _BASE64.match(data)
    assert found is not None
    if found.end() < len(data):
        wrong = bytes(data[found.end() : found.end() + 1]).decode("latin-1")
        raise _refusal(
            place,
            f"character {wrong!r} at position {found.end()} of the data is not allowed in base64 "
            "there; use A-Z, a-z, 0-9, '+', '/' and '=' at the end, no line breaks",
        )
    if len(data) % 4:
        raise _refusal(
            place,
            f"{len(data)} characters of base64 data are not a multiple of 4: the data is cut off, "
            "or its '=' padding is missing",
        )


def _refusal(place: str, problem: str, *, code: str = "invalid_data_url") -> RequestError:
    return RequestError(f"{place}: {problem}", status=400, code=code)
