"""A reply of a Redis server, read from its socket into memory of the caller's.

A client makes an object of every value it reads, however long, which is then copied to where it
belongs; of outputs of megabytes that is most of the time. This reads arrays of values, each of a
length that is told before it, as ``HMGET`` answers them (RESP 2 and 3).
"""

from __future__ import annotations

from collections.abc import Callable

_AHEAD_BYTES = 4096
"""Read at once while it is not known how much comes."""
_MAX_LINE_BYTES = 4096
_NOTHING = (b"$-1", b"_")


class ReplyError(Exception):
    """The server answers an error, which this tells, or what it was not asked for."""


class RawReply:
    """One reply, part after part.

    Args:
        receive_into: The socket's ``recv_into``.
    """

    def __init__(self, receive_into: Callable[[memoryview], int]) -> None:
        self._receive_into = receive_into
        self._ahead = b""

    def begin(self, values: int) -> None:
        """Read the beginning of an array.

        Raises:
            ReplyError: See there.
            OSError: The connection broke, or was silent for too long.
        """
        line = self._line()
        if line != b"*%d" % values:
            raise ReplyError(line.decode("utf-8", "replace").removeprefix("-"))

    def length(self) -> int | None:
        """Read how many bytes the next value has; ``None`` if there is no such value.

        Raises:
            ReplyError: As `begin`.
            OSError: As `begin`.
        """
        line = self._line()
        if line in _NOTHING:
            return None
        if line[:1] != b"$" or not line[1:].isdigit():
            raise ReplyError(f"the server answers {line[:100]!r}, which is no value")
        return int(line[1:])

    def value(self, into: memoryview) -> None:
        """Read a value of as many bytes as ``into`` has.

        Raises:
            OSError: As `begin`.
        """
        done = min(len(self._ahead), into.nbytes)
        into[:done] = self._ahead[:done]
        self._ahead = self._ahead[done:]
        while done < into.nbytes:
            done += self._received(into[done:])
        self._line()

    def _line(self) -> bytes:
        while b"\r\n" not in self._ahead:
            if len(self._ahead) > _MAX_LINE_BYTES:
                raise ReplyError(f"a line of more than {_MAX_LINE_BYTES} bytes")
            piece = memoryview(bytearray(_AHEAD_BYTES))
            self._ahead += piece[: self._received(piece)]
        line, _, self._ahead = self._ahead.partition(b"\r\n")
        return line

    def _received(self, into: memoryview) -> int:
        got = self._receive_into(into)
        if not got:
            raise ConnectionResetError("the server closed the connection")
        return got
