"""The control channel: sockets that carry `epd_portable.wire` messages.

The consumer listens (ZMQ's ROUTER), producers connect (DEALER). Nothing here blocks.
Everything is encrypted, see `epd_portable.transfer.curve`.

On one host *written*, for which requests wait, is sent to a Unix datagram socket next to the
consumer's pool. ZMQ wakes a thread at each end, encrypts and decrypts: on an idle host that takes
longer than all other work of the two ends on an item. A datagram has arrived when the call that
sends it returns. Only this user can open the socket, and this user could as well write to the pool.
A lost datagram is no loss: *written* is repeated until its reply.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import stat
import threading
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import zmq

from epd_portable.errors import ConfigError, ProtocolError, TransportError
from epd_portable.log import trace
from epd_portable.transfer.connections import Connections
from epd_portable.transfer.curve import CurveKeys, Listener, connect_client, receive_parts
from epd_portable.transfer.pool import check_private, path_of
from epd_portable.transfer.registry import paths_within_host
from epd_portable.wire import codec
from epd_portable.wire.messages import AnyMessage, Foreign, Grant, Received, Written

logger = logging.getLogger(__name__)

_HIGH_WATER_MARK = 1000
_POLLIN = int(zmq.POLLIN)
_WITHIN_HOST = paths_within_host()
_LONGEST_UNIX_ADDRESS = 107
MAX_AT_ONCE = 1000
"""Messages that one call returns, so that a flood does not keep its caller."""


class _Alarm:
    """Lets one thread wait for messages of sockets that other threads use.

    ZMQ's own poll would use the sockets meanwhile. Their descriptors can be polled, but are
    edge-triggered, and the next use of the socket consumes the edge.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._ready = select.poll()
        self.watch_descriptor(self._bell)

    def watch_descriptor(self, descriptor: int) -> None:
        """Wait for data of this descriptor, too (level-triggered)."""
        self._ready.register(descriptor, select.POLLIN)

    def watch(self, target: zmq.Socket[bytes]) -> None:
        """Wait for messages of this socket, too."""
        self.watch_descriptor(int(target.getsockopt(zmq.FD)))
        self.ring()

    def forget(self, target: zmq.Socket[bytes]) -> None:
        """Undo `watch`, before the socket is closed."""
        self._ready.unregister(int(target.getsockopt(zmq.FD)))

    def look_again(self, target: zmq.Socket[bytes]) -> None:
        """Ring if a socket that was just used has a message: its use may have consumed the edge."""
        if _has_message(target):
            self.ring()

    def wait(self, timeout_s: float) -> None:
        """Return when it rings, a socket may have a message, or the time is over."""
        if any(each == self._bell for each, _ in self._ready.poll(timeout_s * 1000)):
            os.eventfd_read(self._bell)

    def ring(self) -> None:
        """End a `wait`; does nothing after `close`."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close, when no thread waits any more."""
        with self._lock:
            self._closed = True
            os.close(self._bell)


def _has_message(target: zmq.Socket[bytes]) -> bool:
    return bool(int(target.getsockopt(zmq.EVENTS)) & _POLLIN)


def _arrived(
    target: zmq.Socket[bytes], alarm: _Alarm, *, parts: int, limit: int
) -> Iterator[list[bytes]]:
    """Yield messages that have arrived, see `receive_parts`; at most ``limit``."""
    for _ in range(limit):
        if not _has_message(target):
            return
        yield receive_parts(target, most=parts)
    alarm.ring()  # More may have come, and the edge is consumed.


def _decoded(parts: Sequence[bytes], sender: object) -> tuple[Received, str] | None:
    """Return a message and its session; ``None``, with a warning, for other bytes."""
    try:
        return codec.decode(*parts)
    except ProtocolError as error:
        logger.warning("control message from %r dropped: %r", sender, str(error))
        return None


class _ForeignPeers:
    """Peers with another protocol version, to log each once."""

    def __init__(self) -> None:
        self._logged: set[object] = set()

    def log(self, peer: object, message: Foreign) -> None:
        """Log a peer's version, unless that was logged before."""
        if (peer, message.protocol) in self._logged:
            return
        if len(self._logged) >= MAX_AT_ONCE:
            self._logged.clear()
        self._logged.add((peer, message.protocol))
        logger.warning("control messages from %r are refused: %s", peer, message.problem)


class ControlServer:
    """The consumer's end.

    Args:
        pool: Name of the receive pool, next to which it takes datagrams; empty for none.

    Attributes:
        address: ZMQ address, with the port that was chosen for port 0.

    Raises:
        ConfigError: The datagram socket cannot be made.
        TransportError: The address cannot be bound.
    """

    def __init__(self, address: str, session: str, keys: CurveKeys, pool: str = "") -> None:
        self._session = session
        self._foreign = _ForeignPeers()
        with contextlib.ExitStack() as opened:
            self._listener = Listener(
                address,
                keys,
                name="control channel",
                max_bytes=codec.MAX_MESSAGE_BYTES,
                waiting=_HIGH_WATER_MARK,
            )
            opened.callback(self._listener.close)
            self._inbox = DatagramInbox(pool) if pool else None
            opened.pop_all()
        self._socket, self.address = self._listener.socket, self._listener.address
        self._alarm = _Alarm()
        self._alarm.watch(self._socket)
        if self._inbox is not None:
            self._alarm.watch_descriptor(self._inbox.fileno())

    def wait(self, timeout_s: float) -> None:
        """Return when messages may have arrived, after `wake`, or when the time is over.

        May be called by one thread while another one uses the rest.
        """
        self._alarm.wait(timeout_s)

    def wake(self) -> None:
        """End a `wait` in another thread; does nothing after `close`."""
        self._alarm.ring()

    def receive(self) -> list[tuple[bytes, Received]]:
        """Return ``(identity, message)`` of messages that have arrived; other bytes are logged.

        At most `MAX_AT_ONCE`; the rest comes with the next call. Those of another protocol version
        are refused, too.
        """
        received: list[tuple[bytes, Received]] = []
        while self._inbox is not None and len(received) < MAX_AT_ONCE:
            data = self._inbox.receive()
            if data is None:
                break
            if decoded := _decoded([data], "a datagram"):
                message, session = decoded
                received.append((session.encode(), message))
        limit = MAX_AT_ONCE - len(received)
        for identity, *parts in _arrived(self._socket, self._alarm, parts=2, limit=limit):
            if decoded := _decoded(parts, identity):
                received.append((identity, decoded[0]))
        for identity, message in received:
            if isinstance(message, Foreign):
                self._refuse(identity, message)
        if not received:  # Peers that wait for a reply come first.
            self._listener.log_refusals()
        return received

    def _refuse(self, identity: bytes, message: Foreign) -> None:
        """Refuse a message of another version, in that version."""
        self._foreign.log(identity, message)
        if message.awaits_reply:
            refusal = message.refusal()
            data = codec.encode(refusal, session=self._session, protocol=message.protocol)
            self._socket.send_multipart([identity, data], flags=zmq.NOBLOCK)
            self._alarm.look_again(self._socket)

    def send(self, identity: bytes, message: AnyMessage) -> None:
        """Send to a peer.

        Dropped if the peer is not connected or its queue is full (ZMQ's ROUTER neither blocks nor
        raises); sessions send again.
        """
        data = codec.encode(message, session=self._session)
        self._socket.send_multipart([identity, data], flags=zmq.NOBLOCK)
        self._alarm.look_again(self._socket)

    def close(self) -> None:
        """Close the channel; lingers for at most 0.2 s."""
        self._listener.close()
        self._alarm.close()
        if self._inbox is not None:
            self._inbox.close()


class ControlClients:
    """The producer's end: a connection to each consumer.

    For one thread at a time, except that another one may `wait`, and any may `wake`.
    """

    def __init__(self, session: str, keys: CurveKeys) -> None:
        self._session = session
        self._keys = keys
        self._context = zmq.Context()
        # With the first socket ZMQ makes its own threads, which inherit this thread's CPU affinity.
        self._context.socket(zmq.DEALER).close()
        self._alarm = _Alarm()
        self._sockets = Connections(self._connect, self._leave)
        self._addresses: dict[zmq.Socket[bytes], str] = {}
        self._near: dict[str, DatagramOutbox] = {}
        self._foreign = _ForeignPeers()

    def send(self, address: str, message: AnyMessage) -> None:
        """Send to the consumer that listens on ``address``; connects if need be.

        Dropped if the consumer's queue is full; sessions send again.

        Raises:
            TransportError: The address is invalid, or this process has no socket left.
        """
        data = codec.encode(message, session=self._session)
        if isinstance(message, Written) and self._send_near(address, data):
            return
        target = self._sockets.use(address)
        with contextlib.suppress(zmq.Again):
            target.send(data, flags=zmq.NOBLOCK)
        self._alarm.look_again(target)

    def wait(self, timeout_s: float) -> None:
        """Return when messages may have arrived, after `wake`, or when the time is over."""
        self._alarm.wait(timeout_s)

    def receive(self) -> list[tuple[str, Received]]:
        """Return ``(address, message)`` of messages that have arrived; other bytes are logged.

        At most `MAX_AT_ONCE` of each consumer; the rest comes with the next call.
        """
        received: list[tuple[str, Received]] = []
        for target, address in self._addresses.items():
            for parts in _arrived(target, self._alarm, parts=1, limit=MAX_AT_ONCE):
                if decoded := _decoded(parts, address):
                    message, _ = decoded
                    received.append((address, message))
                    if isinstance(message, Grant):
                        self._granted(address, message)
                    elif isinstance(message, Foreign):
                        self._foreign.log(address, message)
        return received

    def wake(self) -> None:
        """End a `wait` in another thread; does nothing after `close`."""
        self._alarm.ring()

    def close(self) -> None:
        """Close every connection; lingers for at most 0.2 s."""
        self._context.destroy()
        self._alarm.close()
        for address in list(self._near):
            self._depart(address)

    def _granted(self, address: str, grant: Grant) -> None:
        """Open the datagram socket of a consumer that shares this host, if it is not open."""
        trace("transfer.granted", transfer=grant.transfer_id)
        near, pool = self._near.get(address), grant.slot.pool
        if grant.path not in _WITHIN_HOST or (near is not None and near.pool == pool):
            return
        self._depart(address)
        try:
            self._near[address] = DatagramOutbox(pool)
        except (OSError, ValueError) as error:
            logger.info("no datagrams to %s: %r", address, str(error))

    def _send_near(self, address: str, data: bytes) -> bool:
        near = self._near.get(address)
        if near is None:
            return False
        try:
            near.send(data)
        except BlockingIOError:  # The consumer's queue is full.
            return False
        except OSError:  # The consumer has gone.
            self._depart(address)
            return False
        return True

    def _depart(self, address: str) -> None:
        near = self._near.pop(address, None)
        if near is not None:
            near.close()

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        try:
            target = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise TransportError(
                f"control address {address}: no socket can be opened: {error}; raise the limit of "
                "open files (ulimit -n)"
            ) from error
        target.set_hwm(_HIGH_WATER_MARK)
        target.setsockopt(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES)
        target.setsockopt(zmq.IDENTITY, self._session.encode())
        target.setsockopt(zmq.LINGER, 200)
        connect_client(target, address, self._keys, what="control address")
        self._addresses[target] = address
        self._alarm.watch(target)
        trace("control.opened", address=address)
        return target

    def _leave(self, target: zmq.Socket[bytes]) -> None:
        self._alarm.forget(target)
        self._depart(self._addresses.pop(target))
        target.close()


class DatagramInbox:
    """The consumer's datagram socket; a file of its name that a dead owner left is replaced.

    Raises:
        ConfigError: The file of that name cannot be replaced: another user's.
        ValueError: ``pool`` is no name of a pool.
    """

    def __init__(self, pool: str) -> None:
        self._path = _datagram_path(pool)
        self._socket = _datagram_socket()
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
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def receive(self) -> bytes | None:
        """Return the next message, or ``None``; one that is too long is cut after the limit."""
        try:
            return self._socket.recv(codec.MAX_MESSAGE_BYTES + 1)
        except BlockingIOError:
            return None

    def close(self) -> None:
        """Close and remove it."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


class DatagramOutbox:
    """A producer's datagram socket to one consumer, by the name of its pool.

    Raises:
        OSError: There is no such socket of this user alone on this host.
        ValueError: ``pool`` is no name of a pool.
    """

    def __init__(self, pool: str) -> None:
        self.pool = pool
        path = _datagram_path(pool)
        check_private(path, path.lstat(), stat.S_ISSOCK)
        self._socket = _datagram_socket()
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise

    def send(self, data: bytes) -> None:
        """Send one message; `BlockingIOError` if the queue is full, `OSError` if none reads it."""
        self._socket.send(data)

    def close(self) -> None:
        """Close it."""
        self._socket.close()


def _datagram_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)


def _datagram_path(pool: str) -> Path:
    path = path_of(pool)
    found = path.with_name(f"{path.name}.control")
    if len(str(found)) > _LONGEST_UNIX_ADDRESS:
        short = blake2b(pool.encode(), digest_size=16).hexdigest()
        found = path.with_name(f"{path.name[:40]}-{short}.control")
    return found
