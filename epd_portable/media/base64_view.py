"""Bytes at any place of a base64 text, without decoding the rest of it."""

from __future__ import annotations

import binascii

from epd_portable.errors import MediaError

MAX_STEPS = 65_536
"""Boxes, segments, chunks and table entries that are looked at in one file."""

_FIRST_WINDOW = 768
_LARGEST_WINDOW = 24_576


class Base64View:
    """A file that is there as base64 text. Nothing of it is copied but what is asked for.

    What is decoded is kept until something else is asked for, and more at a time while reading goes
    straight on.

    Args:
        text: Base64 of the whole file in the standard alphabet, with padding, without line breaks.

    Raises:
        MediaError: The text's length is not that of base64.

    Attributes:
        size: Bytes of the file.
    """

    __slots__ = ("_begin", "_end", "_steps", "_text", "_window", "_window_size", "size")

    def __init__(self, text: bytes | memoryview) -> None:
        if not text or len(text) % 4:
            raise MediaError(
                f"{len(text)} characters are no base64 text: send a multiple of 4, with '=' padding"
            )
        self._text = memoryview(text)
        self.size = len(text) // 4 * 3 - bytes(self._text[-2:]).count(b"=")
        self._window = b""
        self._begin = self._end = 0
        self._window_size = _FIRST_WINDOW
        self._steps = 0

    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes from ``offset`` on.

        Raises:
            MediaError: They are not all there, or are not base64.
        """
        begin = offset - self._begin
        if begin < 0 or offset + count > self._end:
            self._decode(offset, count)
            begin = offset - self._begin
        return self._window[begin : begin + count]

    def number(self, offset: int, count: int) -> int:
        """Return ``count`` bytes from ``offset`` on as an integer, most significant byte first.

        Raises:
            MediaError: As `read`.
        """
        return int.from_bytes(self.read(offset, count), "big")

    def little(self, offset: int, count: int) -> int:
        """Return ``count`` bytes from ``offset`` on as an integer, least significant byte first.

        Raises:
            MediaError: As `read`.
        """
        return int.from_bytes(self.read(offset, count), "little")

    def step(self, count: int = 1) -> None:
        """Count one more part of the file that is looked at.

        Raises:
            MediaError: That were too many: reading on could take anybody's time.
        """
        self._steps += count
        if self._steps > MAX_STEPS:
            raise MediaError(f"it has more than {MAX_STEPS} parts: send a simpler file")

    def _decode(self, offset: int, count: int) -> None:
        if offset < 0 or count < 0 or offset + count > self.size:
            raise MediaError(
                f"it ends at byte {self.size}, and its headers go on to byte {offset + count}: "
                "send the whole file"
            )
        straight_on = self._begin <= offset <= self._end and self._end > 0
        self._window_size = (
            min(2 * self._window_size, _LARGEST_WINDOW) if straight_on else _FIRST_WINDOW
        )
        begin = offset // 3
        end = min((offset + max(count, self._window_size) + 2) // 3, len(self._text) // 4)
        try:
            window = binascii.a2b_base64(self._text[4 * begin : 4 * end])
        except binascii.Error as error:
            raise self._not_base64(begin, end) from error
        # What is no base64 is left out without an error.
        if len(window) != min(3 * end, self.size) - 3 * begin:
            raise self._not_base64(begin, end)
        self._window, self._begin, self._end = window, 3 * begin, 3 * begin + len(window)

    def _not_base64(self, begin: int, end: int) -> MediaError:
        return MediaError(
            f"characters {4 * begin} to {4 * end} are not all base64: use A-Z, a-z, 0-9, '+' and "
            "'/', and '=' at the end only"
        )
