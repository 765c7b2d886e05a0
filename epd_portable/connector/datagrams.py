"""*Written* to a consumer on the same host: a Unix datagram socket beside its pool.

ZMQ wakes a thread at each end, encrypts and decrypts: on an idle host that takes longer than all
other work of the two ends on an item. A datagram has arrived when the call that sends it returns.

Only this user can open the socket, and this user could as well write to the pool itself. A lost
datagram is no loss: *written* is sent until it is answered.
"""

from __future__ import annotations

import os
import socket
import stat
from hashlib import blake2b
from pathlib import Path

from epd_portable.connector.pool import check_private, path_of
from epd_portable.errors import ConfigError
from epd_portable.wire.codec import MAX_MESSAGE_BYTES

_LONGEST_ADDRESS = 107


def _address(pool: str) -> Path:
    path = path_of(pool)
    found = path.with_name(f"{path.name}.control")
    if len(str(found)) > _LONGEST_ADDRESS:
        short = blake2b(pool.encode(), digest_size=16).hexdigest()
        found = path.with_name(f"{path.name[:40]}-{short}.control")
    return found


class DatagramInbox:
    """The consumer's end.

    Args:
        pool: Name of its receive pool; a file of that name left by a dead owner is replaced.

    Raises:
        ConfigError: The file of that name cannot be replaced: another user's.
        ValueError: It is no name of a pool.
    """

    def __init__(self, pool: str) -> None:
        self._path = _address(pool)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(self._socket.fileno(), 0o600)  # Before the file exists.
            self._path.unlink(missing_ok=True)
            self._socket.bind(str(self._path))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"control socket {self._path} cannot be made: {error.strerror}; remove what has "
                "that name, which is not this user's, and look who put it there"
            ) from error

    def fileno(self) -> int:
        """Return the socket's descriptor, for `select.poll`."""
        return self._socket.fileno()

    def receive(self) -> bytes | None:
        """Return the next message, or ``None``; one that is too long is cut after the limit."""
        try:
            return self._socket.recv(MAX_MESSAGE_BYTES + 1)
        except BlockingIOError:
            return None

    def close(self) -> None:
        """Close and remove it."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


class DatagramOutbox:
    """A producer's end to one consumer.

    Args:
        pool: Name of the consumer's pool, as it says.

    Raises:
        OSError: There is no such socket of this user alone on this host.
        ValueError: It is no name of a pool.
    """

    def __init__(self, pool: str) -> None:
        self.pool = pool
        path = _address(pool)
        check_private(path, path.lstat(), stat.S_ISSOCK)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise

    def send(self, data: bytes) -> None:
        """Send one message.

        Raises:
            BlockingIOError: The consumer's queue is full.
            OSError: The consumer has gone.
        """
        self._socket.send(data)

    def close(self) -> None:
        """Close it."""
        self._socket.close()
