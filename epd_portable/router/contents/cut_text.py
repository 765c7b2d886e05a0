"""JSON whose long strings are cut out: reading and writing it costs what the rest of it costs.

Nearly all of a large body is the base64 text of a picture or a film. Such a string stays where it
came to; a short random word stands for it in the text that is read, changed and
written, and what is written is sent in segments, with views of the strings between them.
Pure; and of large texts, done in steps between which other threads run.
"""

from __future__ import annotations

import mmap
import secrets
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from epd_portable.errors import RequestError

Data = bytes | bytearray | mmap.mmap
Bytes = bytes | memoryview
Segments = Sequence[Bytes]
"""A body in pieces, in order; views are of what the client sent."""

LONG_BYTES = 4096
"""Stretches of a string from this length on are cut out."""
_STEP_BYTES = 4 << 20
_COUNT_BYTES = 512 << 10
_UNESCAPE_BYTES = 256 << 10
"""Large texts are looked at in steps of such sizes, some half millisecond each."""
_PAUSE_S = 50e-6
"""After a step: long enough for a waiting thread to take the interpreter lock."""

_WINDOW = LONG_BYTES // 2
"""A stretch without a quote from `LONG_BYTES` on holds a whole window of the text."""
_OUTSIDE = frozenset(b" \t\r\n,:]}")
"""What may follow the quote that ends a string. After any other byte, it began one, or is in it."""
_MOST_ESCAPES = 64
_DIGITS = 8
_LONGEST_ESCAPE = len(r"\u0000")

T = TypeVar("T")
_text = msgspec.json.Decoder(str)


class CutText:
    """A body's JSON, cut.

    Args:
        data: As the client sent it; must not change afterwards.
        whole: Cut nothing.

    Attributes:
        small: The JSON without its long strings. Of a text that is no JSON, this is none either.
    """

    __slots__ = ("_added", "_data", "_mark", "_runs", "_view", "small")

    def __init__(self, data: Data, *, whole: bool = False) -> None:
        self._data = data
        self._view = memoryview(data)
        self._mark = b""
        self._added: list[Bytes] = []
        self._runs = [] if whole or len(data) < LONG_BYTES else _long_runs(data)
        self.small: Data = data
        if self._runs:
            # In no text by chance, and in none on purpose: it is made after the text has come.
            self._mark = secrets.token_hex(8).encode()
            pieces: list[Bytes] = []
            done = 0
            for index, (start, stop) in enumerate(self._runs):
                pieces += self._view[done:start], b"%s%0*d" % (self._mark, _DIGITS, index)
                done = stop
            self.small = b"".join([*pieces, self._view[done:]])

    def segments(self, written: bytes) -> list[Bytes]:
        """Return a text with the long strings in their places again.

        Args:
            written: Made of parts of `small`, and of others.
        """
        if not self._mark or self._mark not in written:
            return [written]
        first, *others = written.split(self._mark)
        pieces: list[Bytes] = [first]
        for other in others:
            index = int(other[:_DIGITS])
            if index < len(self._runs):
                start, stop = self._runs[index]
                pieces.append(self._view[start:stop])
            else:
                pieces.append(self._added[index - len(self._runs)])
            if len(other) > _DIGITS:
                pieces.append(other[_DIGITS:])
        return pieces

    def stand_in(self, string: Bytes) -> bytes:
        """Return a word for a string that did not come with the text.

        Args:
            string: JSON, without quotes. Wherever the word is written, it is sent in its place.
        """
        if not self._mark:
            self._mark = secrets.token_hex(8).encode()
        self._added.append(string)
        return b"%s%0*d" % (self._mark, _DIGITS, len(self._runs) + len(self._added) - 1)

    def whole(self, written: bytes) -> bytes:
        """Return such a text in one piece."""
        return b"".join(self.segments(written))

    def original(self) -> Bytes:
        """Return the whole text as it came."""
        return self._data if isinstance(self._data, bytes) else self._view

    def count(self, what: bytes) -> int:
        """Return how many times something stands in `small`, but for one on a border of steps."""
        found = 0
        for place in range(0, len(self.small), _COUNT_BYTES):
            if place > 0:
                time.sleep(_PAUSE_S)
            found += self.small[place : place + _COUNT_BYTES].count(what)
        return found

    def text(self, raw: msgspec.Raw, where: str) -> str:
        """Return a JSON string; see `decode`."""
        if self._runs and self._mark in bytes(raw):
            return bytes(self.text_bytes(raw, where)).decode("utf-8", "replace")
        return decode(_text, raw, where)

    def text_bytes(self, raw: msgspec.Raw, where: str) -> Bytes:
        """Return a JSON string's UTF-8 bytes; of a long one without escapes, a view.

        Long ones with escapes that no media have are refused, too; see `decode`.
        """
        written = bytes(raw)
        pieces = self.segments(written)
        if len(pieces) == 1 or written[:1] != b'"':
            if written[:1] == b'"' and b"\\" not in written:
                return written[1:-1]
            return decode(_text, raw, where).encode()
        if len(pieces) != 3 or pieces[0] != b'"' or pieces[2] != b'"':
            return _unescaped(memoryview(b"".join(pieces))[1:-1], where)
        start, stop = self._runs[int(written[1 + len(self._mark) : -1])]
        run = self._view[start:stop]
        return run if _find(self._data, b"\\", start, stop) < 0 else _unescaped(run, where)


def decode(decoder: msgspec.json.Decoder[T], raw: msgspec.Raw, where: str) -> T:
    """Return a value of a client's JSON.

    Raises:
        RequestError: 400; it is of another type. Names the place.
    """
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"{where}: {error}", status=400, code="invalid_field") from error


def decode_if_valid(raw: Bytes | msgspec.Raw, kind: type[T]) -> T | None:
    """Return what JSON of an instance or a client says; ``None`` if it is of another type."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def opens(raw: msgspec.Raw, bracket: bytes) -> bool:
    """Return whether a JSON value begins with this byte."""
    return bytes(memoryview(raw)[:1]) == bracket


def _long_runs(data: Data) -> list[tuple[int, int]]:
    """Return where long stretches without a quote begin and end, each within one string.

    A stretch ends at any quote, an escaped one too. One that is left out costs time, not
    correctness, so whatever is in doubt is left out.
    """
    runs = []
    done = place = 0
    while place + _WINDOW <= len(data):
        if data.find(b'"', place, place + _WINDOW) >= 0:
            place += _WINDOW
            continue
        start = data.rfind(b'"', done, place) + 1
        quote = _find(data, b'"', place + _WINDOW, len(data))
        stop = quote if quote >= 0 else len(data)
        tail = data[stop - _MOST_ESCAPES : stop]
        escapes = len(tail) - len(tail.rstrip(b"\\"))
        end = stop - escapes % 2
        if (
            start > 0
            and data[start] not in _OUTSIDE
            and end - start >= LONG_BYTES
            and escapes < _MOST_ESCAPES
        ):
            runs.append((start, end))
        done = stop
        place = stop + 1
    return runs


def _find(data: Data, what: bytes, start: int, stop: int) -> int:
    """Do as ``data.find`` does for one byte, in steps."""
    for place in range(start, stop, _STEP_BYTES):
        if place > start:
            time.sleep(_PAUSE_S)
        found = data.find(what, place, min(place + _STEP_BYTES, stop))
        if found >= 0:
            return found
    return -1


def _unescaped(string: memoryview, where: str) -> memoryview:
    """Return what stands between the quotes of a long JSON string.

    Done in steps that end before an escape or after one. They may cut other things in two, two
    backslashes for example: media have none of these, and they are refused.
    """
    # Memory that is cleared page by page, as it is written to.
    text = memoryview(mmap.mmap(-1, len(string)))
    start = done = 0
    while start < len(string):
        if start > 0:
            time.sleep(_PAUSE_S)
        stop = min(start + _UNESCAPE_BYTES, len(string))
        if stop < len(string):
            escape = bytes(string[stop - _LONGEST_ESCAPE : stop]).rfind(b"\\")
            stop += escape - _LONGEST_ESCAPE if escape >= 0 else 0
        step = decode(_text, msgspec.Raw(b'"%b"' % bytes(string[start:stop])), where).encode()
        text[done : done + len(step)] = step
        start = stop
        done += len(step)
    return text[:done]
