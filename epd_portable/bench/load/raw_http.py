"""HTTP/1.1 messages, taken apart as they come, for both ends of a router under measurement.

What stands on either side of the router must cost little beside it, so this reads what two ends of
one measurement say to each other and no more: lengths, chunks, ends. Nothing is copied but what a
protocol asks for.
"""

from __future__ import annotations

import asyncio
import re
from typing import cast

MAX_HEAD_BYTES = 64 * 1024

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_HEAD, _LENGTH_KNOWN, _IN_CHUNK, _CHUNK_LINE, _TRAILER, _UNTIL_CLOSE = range(6)


class MessageProtocol(asyncio.Protocol):
    """One connection, on which messages follow each other.

    Subclasses are told of each message: `head_arrived`, `piece_arrived` as often as it takes, then
    `message_ended`. A message that is none ends the connection, with the reason in `problem`.

    Args:
        responses: Whether what arrives are responses; else they are requests.

    Attributes:
        transport: Of the connection, once it is made.
        problem: What was wrong with what arrived, or empty.
    """

    transport: asyncio.Transport

    def __init__(self, *, responses: bool) -> None:
        self._responses = responses
        self._state = _HEAD
        self._left = 0
        self._rest = b""
        self.problem = ""

    def head_arrived(self, head: bytes) -> None:
        """Take the first line and the headers, each with its line's end."""
        raise NotImplementedError

    def piece_arrived(self, piece: bytes) -> None:
        """Take the next bytes of the body, without the framing of chunks."""
        raise NotImplementedError

    def message_ended(self) -> None:
        """Act on a message that is complete."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to write."""
        # Those of other event loops need not be of asyncio's class.
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Take what the socket has."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        try:
            at = self._read(data)
        except ValueError as error:
            self.problem = str(error)
            self.transport.abort()
            return
        if at < len(data):
            self._rest = data[at:]

    def eof_received(self) -> None:
        """End a message that goes on until the connection closes."""
        if self._state == _UNTIL_CLOSE:
            self._end_message()

    def _read(self, data: bytes) -> int:
        """Return up to where the data has been used."""
        at, end = 0, len(data)
        while at < end:
            if self._state in (_LENGTH_KNOWN, _IN_CHUNK):
                piece = data[at : at + self._left] if at or self._left < end else data
                at += len(piece)
                self._left -= len(piece)
                self.piece_arrived(piece)
                if not self._left:
                    if self._state == _LENGTH_KNOWN:
                        self._end_message()
                    else:
                        self._state = _CHUNK_LINE
            elif self._state == _HEAD:
                stop = data.find(b"\r\n\r\n", at)
                if stop < 0:
                    if end - at > MAX_HEAD_BYTES:
                        raise ValueError(f"a head of more than {MAX_HEAD_BYTES} bytes")
                    break
                self._begin_message(data[at : stop + 2])
                at = stop + 4
            elif self._state == _UNTIL_CLOSE:
                self.piece_arrived(data[at:])
                at = end
            else:
                stop = data.find(b"\r\n", at)
                if stop < 0:
                    break
                line, at = data[at:stop], stop + 2
                self._take_line(line)
        return at

    def _begin_message(self, head: bytes) -> None:
        status = int(head[9:12]) if self._responses else 0
        if 100 <= status < 200:
            return
        self.head_arrived(head)
        if _CHUNKED.search(head):
            self._state = _CHUNK_LINE
            return
        length = _LENGTH.search(head)
        if length is None and self._responses and status not in (204, 304):
            self._state = _UNTIL_CLOSE
            return
        self._left = int(length[1]) if length else 0
        self._state = _LENGTH_KNOWN
        if not self._left:
            self._end_message()

    def _take_line(self, line: bytes) -> None:
        """Take the line before a chunk, or one after the last."""
        if self._state == _TRAILER:
            if not line:
                self._end_message()
        elif line:
            self._left = int(line.partition(b";")[0], 16)
            self._state = _IN_CHUNK if self._left else _TRAILER
        # An empty line here is the end of the chunk before.

    def _end_message(self) -> None:
        self._state = _HEAD
        self.message_ended()
