from __future__ import annotations

import asyncio
from typing import cast

import pytest

from epd_portable.bench.load.raw_http import MAX_HEAD_BYTES, MessageProtocol


class Transport:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class Recorder(MessageProtocol):
    """Remembers complete messages: the first line of each and its body."""

    def __init__(self, *, responses: bool) -> None:
        super().__init__(responses=responses)
        self.seen: list[tuple[bytes, bytes]] = []
        self._line = self._body = b""
        self.connection_made(cast("asyncio.BaseTransport", Transport()))

    def head_arrived(self, head: bytes) -> None:
        self._line, self._body = head.partition(b"\r\n")[0], b""

    def piece_arrived(self, piece: bytes) -> None:
        self._body += piece

    def message_ended(self) -> None:
        self.seen.append((self._line, self._body))


OK = b"HTTP/1.1 200 OK"
RESPONSES = (
    OK + b"\r\nContent-Length: 5\r\n\r\nhello"
    b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nlate: 1\r\n\r\n"
    b"HTTP/1.1 204 No Content\r\n\r\n" + OK + b"\r\ncontent-length: 0\r\n\r\n"
)
READ = [(OK, b"hello"), (OK, b"abc0123456789"), (b"HTTP/1.1 204 No Content", b""), (OK, b"")]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_messages_are_the_same_in_whatever_pieces_they_come(size: int) -> None:
    recorder = Recorder(responses=True)
    for at in range(0, len(RESPONSES), size):
        recorder.data_received(RESPONSES[at : at + size])
    assert recorder.seen == READ
    assert not recorder.problem


def test_a_request_without_a_length_has_no_body() -> None:
    recorder = Recorder(responses=False)
    recorder.data_received(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nPOST / HTTP/1.1\r\n")
    recorder.data_received(b"content-length: 2\r\n\r\n{}")
    assert recorder.seen == [(b"GET /health HTTP/1.1", b""), (b"POST / HTTP/1.1", b"{}")]


def test_a_response_without_a_length_ends_with_its_connection() -> None:
    recorder = Recorder(responses=True)
    recorder.data_received(OK + b"\r\n\r\nabc")
    recorder.data_received(b"def")
    assert not recorder.seen
    recorder.eof_received()
    assert recorder.seen == [(OK, b"abcdef")]


@pytest.mark.parametrize(
    "data",
    [
        OK + b"\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"x" * (MAX_HEAD_BYTES + 1),
    ],
)
def test_what_is_no_message_ends_the_connection_with_a_reason(data: bytes) -> None:
    recorder = Recorder(responses=True)
    recorder.data_received(data)
    assert recorder.problem
    assert cast("Transport", recorder.transport).aborted
