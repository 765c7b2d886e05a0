"""The short way to a consumer on the same host: a Unix datagram socket beside its pool.

By ZMQ a message passes a thread of each end, which have to be woken, encrypts and is decrypted: on
an idle host that takes longer than all that the two ends do about an item. A datagram is in the
consumer's hands when the call that sends it returns. It has one part and a largest size.

Nobody but this user can open the socket, as nobody else can open the pool: who could send by it
could as well write the items themselves. It carries what is sent again until it is answered, so
nothing is lost with it; the channel that everything else takes stays ZMQ's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from hashlib import blake2b
from pathlib import Path

from epd_portable.connector.pool import path_of
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
        pool: Name of its receive pool; what a dead owner left under it is replaced.

    Raises:
        ConfigError: What has that name cannot be replaced: another user's.
        ValueError: It is no name of a pool.
    """

    def __init__(self, pool: str) -> None:
        self._path = _address(pool)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(self._socket.fileno(), 0o600)  # So the file never is anybody else's to open.
            self._path.unlink(missing_ok=True)
            self._socket.bind(str(self._path))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"control socket {self._path} cannot be made: {error.strerror}; remove what has "
                "that name, which is not this user's, and look who put it there"
            ) from error

    def fileno(self) -> int:
        """Return the descriptor that can be read from when something has come."""
        return self._socket.fileno()

    def receive(self) -> bytes | None:
        """Return the next message, of one too long a byte more than is allowed; or ``None``."""
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
        OSError: There is none of this user's alone under that name on this host.
        ValueError: It is no name of a pool.
    """

    def __init__(self, pool: str) -> None:
        self.pool = pool
        path = _address(pool)
        found = path.lstat()
        if (
            not stat.S_ISSOCK(found.st_mode)
            or found.st_uid != os.geteuid()
            or stat.S_IMODE(found.st_mode) & 0o077
        ):
            raise PermissionError(
                errno.EPERM,
                f"{path} is {stat.filemode(found.st_mode)} of user {found.st_uid}, not a socket of "
                f"user {os.geteuid()} that nobody else may open",
            )
        with contextlib.ExitStack() as opened:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            opened.callback(made.close)
            made.connect(str(path))
            opened.pop_all()
        self._socket = made

    def send(self, data: bytes) -> None:
        """Send one message.

        Raises:
            BlockingIOError: Too much waits there already.
            OSError: The consumer has gone.
        """
        self._socket.send(data)

    def close(self) -> None:
        """Close it."""
        self._socket.close()
