"""Which format a media file has, and what it would be when decoded. Pure.

A format is told by content, as decoders do, never by a name that a client gives. Where a container
tells the size of its pictures, the codec's own stream within is not read: vLLM compares that with
``VLLM_MAX_IMAGE_PIXELS`` when it decodes. Formats without compression that begin with nothing of
their own can pose as others; they hold no more pixels than bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from epd_portable.errors import MediaError, UnknownMediaError
from epd_portable.media import boxes, matroska, pictures, riff, sound
from epd_portable.media.base64_view import Base64View
from epd_portable.media.extent import Extent, Reader

Modality = Literal["image", "video", "audio"]

PICTURES: dict[str, Reader] = {
    "PNG": pictures.png,
    "JPEG": pictures.jpeg,
    "GIF": pictures.gif,
    "WebP": riff.webp,
    "BMP": pictures.bmp,
    "TIFF": pictures.tiff,
    "AVIF/HEIF": boxes.items,
    "JPEG 2000": boxes.jpeg_2000,
    "JPEG 2000 code stream": boxes.code_stream,
    "PNM": pictures.netpbm,
    "ICO": pictures.ico,
}
CONTAINERS: dict[str, Reader] = {
    "MP4/MOV": boxes.movie,
    "WebM/Matroska": matroska.matroska,
    "AVI": riff.avi,
}
SOUND: dict[str, Reader] = {
    "WAV": riff.wav,
    "FLAC": sound.flac,
    "OGG": sound.ogg,
    "MP3": sound.mp3,
}
READERS: Mapping[Modality, Mapping[str, Reader]] = {
    "image": PICTURES,
    # Pictures are short videos to what decodes videos.
    "video": CONTAINERS | PICTURES,
    # Of a video, the sound track is taken.
    "audio": SOUND | CONTAINERS,
}
"""Formats in which a modality comes, and the function that reads each."""

_BEGINNINGS = (
    (pictures.PNG_SIGNATURE, "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000 code stream"),
    (b"\0\0\1\0", "ICO"),
    (b"\0\0\2\0", "ICO"),
    (b"\x1a\x45\xdf\xa3", "WebM/Matroska"),
    (b"fLaC", "FLAC"),
    (b"OggS", "OGG"),
    *((b"P%d" % number, "PNM") for number in range(1, 7)),
)
_RIFF = {b"WAVE": "WAV", b"AVI ": "AVI", b"WEBP": "WebP"}
_ITEM_BRANDS = frozenset({b"avif", b"avis", b"heic", b"heix", b"heim", b"hevc", b"mif1", b"msf1"})
_MOVIE_BOXES = frozenset({b"moov", b"mdat", b"wide", b"free", b"skip", b"styp", b"moof"})


def kind_of(view: Base64View) -> str | None:
    """Return the name of a file's format; ``None`` if it is not known.

    Raises:
        MediaError: It is no base64.
    """
    head = view.read(0, min(view.size, 16))
    for beginning, kind in _BEGINNINGS:
        if head.startswith(beginning):
            return kind
    if head[:4] in (b"RIFF", b"RF64", b"BW64"):
        return _RIFF.get(head[8:12])
    if head[4:8] == b"ftyp":
        return "AVIF/HEIF" if head[8:12] in _ITEM_BRANDS else "MP4/MOV"
    if head[4:8] in _MOVIE_BOXES:
        return "MP4/MOV"
    if head[:3] == b"ID3":
        at = sound.after_tags(view)
        return "FLAC" if view.read(at, min(4, view.size - at)) == b"fLaC" else "MP3"
    if head[:1] == b"\xff" and len(head) > 1 and head[1] >= 0xE0 and head[1] >> 1 & 3:
        return "MP3"
    return None


def extent_of(text: bytes | memoryview, modality: Modality, *, count_frames: bool) -> Extent:
    """Return what a file would be when it is decoded.

    Args:
        text: Base64 of the file.
        modality: What the file is taken as.
        count_frames: Whether all frames are counted where that takes a walk through the file.

    Raises:
        UnknownMediaError: Its format is none in which the modality comes.
        MediaError: It is cut off or broken, or it takes too long to tell.
    """
    view = Base64View(text)
    kind = kind_of(view)
    if kind is None or kind not in READERS[modality]:
        beginning = view.read(0, min(view.size, 12))
        what = f"it begins with {beginning!r}" if kind is None else f"it is {kind}"
        raise UnknownMediaError(
            f"{what}, and none of the formats that are understood of {modality}: "
            + ", ".join(READERS[modality])
        )
    try:
        return READERS[modality][kind](view, count_frames)
    except MediaError as error:
        raise MediaError(f"{kind}: {error}") from error
