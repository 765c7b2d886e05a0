"""Replies of a Redis server, in whatever pieces they come."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epd_portable.connector.stores.redis import RawReply, ReplyError


def coming(data: bytes, at_once: int) -> Callable[[memoryview], int]:
    """Return what a socket's ``recv_into`` would be, a few bytes at a time."""
    left = bytearray(data)

    def receive_into(into: memoryview) -> int:
        piece = bytes(left[: min(at_once, into.nbytes)])
        del left[: len(piece)]
        into[: len(piece)] = piece
        return len(piece)

    return receive_into


@pytest.mark.parametrize("at_once", [1, 2, 7, 5000, 1 << 20])
def test_values_come_whole_however_they_are_cut(at_once: int) -> None:
    large = bytes(range(256)) * 100 + b"\r\n"
    data = b"*3\r\n$3\r\na\r\n\r\n$-1\r\n$%d\r\n%s\r\n*1\r\n_\r\n" % (len(large), large)
    reply = RawReply(coming(data, at_once))
    reply.read_array(3)
    assert reply.read_length() == 3
    small = bytearray(3)
    reply.read_value(memoryview(small))
    assert small == b"a\r\n"
    assert reply.read_length() is None
    assert reply.read_length() == len(large)
    into = bytearray(len(large))
    reply.read_value(memoryview(into))
    assert into == large
    reply.read_array(1)
    assert reply.read_length() is None


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"-LOADING the dataset\r\n", "^LOADING the dataset$"),
        (b"*3\r\n", r"^\*3$"),
        (b"*2\r\n:5\r\n", "':5', which is no value"),
        (b"*2\r\n$-7\r\n", r"'\$-7', which is no value"),
    ],
)
def test_errors_and_other_replies_are_told(data: bytes, said: str) -> None:
    reply = RawReply(coming(data, 100))
    with pytest.raises(ReplyError, match=said):
        reply.read_array(2)
        reply.read_length()


@pytest.mark.parametrize("data", [b"", b"*1\r\n$4\r\nab"])
def test_a_connection_that_ends_is_told(data: bytes) -> None:
    reply = RawReply(coming(data, 100))
    with pytest.raises(ConnectionResetError):
        reply.read_array(1)
        reply.read_length()
        reply.read_value(memoryview(bytearray(4)))
