"""What a media file holds, and the form of the functions that read it from the file's headers."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from epd_portable.errors import MediaError
from epd_portable.media.base64_view import Base64View

MAX_SAMPLES_PER_S = 96_000
"""A rate of samples that is higher makes a clip no shorter: anybody can write one into a header."""


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """What a file would be when it is decoded.

    Attributes:
        width: Pixels of the largest picture in it; 0 of sound.
        height: The same.
        frames: Pictures one after another, or on several pages; 0 of sound. Of a file whose frames
            were not to be counted, 1.
        seconds: How long it plays; 0 of pictures.
    """

    width: int = 0
    height: int = 0
    frames: int = 0
    seconds: float = 0.0


Reader = Callable[[Base64View, bool], Extent]
"""Reads one format: the file, and whether frames are counted where that takes a long walk."""


def picture(width: int, height: int, *, frames: int = 1, seconds: float = 0.0) -> Extent:
    """Return the extent of pictures.

    Raises:
        MediaError: They have no pixels.
    """
    if width <= 0 or height <= 0:
        raise MediaError(f"its headers say {width} × {height} pixels: send a picture that has some")
    return Extent(width=width, height=height, frames=max(frames, 1), seconds=seconds)


def seconds_of(samples: int, rate: int) -> float:
    """Return how long samples of sound play.

    Raises:
        MediaError: There is no such rate.
    """
    if rate <= 0:
        raise MediaError(f"its headers say {rate} samples a second: send a clip that can be played")
    return samples / min(rate, MAX_SAMPLES_PER_S)
