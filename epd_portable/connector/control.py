"""The control channel: ZMQ sockets that carry `epd_portable.wire` messages.

The consumer listens (ROUTER), producers and the router connect (DEALER). Nothing here blocks.
Everything is encrypted, see `epd_portable.connector.curve`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import uuid
from pathlib import Path

import zmq

from epd_portable.connector.connections import Connections
from epd_portable.connector.curve import CurveGate, CurveKeys, connect_client, receive_parts
from epd_portable.errors import ProtocolError, TransportError
from epd_portable.log import trace
from epd_portable.wire import codec
from epd_portable.wire.messages import AnyMessage

logger = logging.getLogger(__name__)

_HIGH_WATER_MARK = 1000
MAX_AT_ONCE = 1000
"""Messages that one call takes in, so that a flood does not keep its caller."""


def new_session() -> str:
    """Return a name for this life of the process, for `process_is_gone` and unique."""
    pid = os.getpid()
    _, start = _process(pid)
    return f"{pid}-{start}-{_pid_namespace()}-{uuid.uuid4().hex[:12]}"


def process_is_gone(session: str) -> bool:
    """Tell whether the process that made a session on this host has certainly ended.

    A zombie has ended: it writes no memory any more. A pid that another process was given since
    does not count, nor does a pid of another namespace (a container that shares ``/dev/shm``).
    """
    parts = session.split("-")
    if len(parts) != 4 or not parts[0].isdecimal() or parts[2] != _pid_namespace():
        return False
    pid = int(parts[0])
    try:
        state, start = _process(pid)
    except (FileNotFoundError, ProcessLookupError):
        return not _pid_exists(pid)
    return state in ("Z", "X") or start != parts[1]


def _process(pid: int) -> tuple[str, str]:
    """Return state and start time of a process, as in ``/proc/<pid>/stat``."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _pid_exists(pid: int) -> bool:
    """Tell whether there is such a process, also where ``/proc`` hides those of other users."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _pid_namespace() -> str:
    return "".join(filter(str.isdecimal, os.readlink("/proc/self/ns/pid")))


def host_identity() -> str:
    """Return a string that is equal for processes that share a host and its ``/dev/shm``."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    boot = boot_id.read_text().strip() if boot_id.exists() else socket.gethostname()
    shm = Path("/dev/shm")
    return f"{boot}:{shm.stat().st_dev if shm.exists() else 'none'}"


class ControlServer:
    """The consumer's end.

    Args:
        address: ZMQ address to listen on.
        session: Of this process.
        keys: Of the deployment.

    Raises:
        TransportError: The address cannot be bound.
    """

    def __init__(self, address: str, session: str, keys: CurveKeys) -> None:
        self._session = session
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # Who comes again has lost its former connection, whether that was noticed here or not.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.set_hwm(_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready = select.poll()
        self._ready.register(self._wake, select.POLLIN)
        self._ready.register(int(self._socket.getsockopt(zmq.FD)), select.POLLIN)
        self._gate = CurveGate(self._socket, address, keys, name="control channel")
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(
                f"control channel cannot listen on {address}: {error}; free it or take another"
            ) from error

    @property
    def address(self) -> str:
        """Where it listens, with the port that was chosen for port 0."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait(self, timeout_s: float) -> None:
        """Return when messages may have arrived, after `wake`, or when the time is over.

        For one thread, beside another that does everything else with this object.
        """
        self._ready.poll(timeout_s * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def wake(self) -> None:
        """End a `wait` in another thread."""
        os.eventfd_write(self._wake, 1)

    def receive(self) -> list[tuple[bytes, AnyMessage]]:
        """Return what has arrived, as ``(identity, message)``; what is no message is logged.

        At most `MAX_AT_ONCE`; the rest comes with the next call.
        """
        received: list[tuple[bytes, AnyMessage]] = []
        for _ in range(MAX_AT_ONCE):
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break
            identity, *parts = receive_parts(self._socket, most=2)
            try:
                message, _session = codec.decode_parts(parts)
            except ProtocolError as error:
                logger.warning("control message from %r dropped: %r", identity, str(error))
            else:
                received.append((identity, message))
        if not received:  # Who has the key waits for an answer.
            self._gate.look()
        return received

    def send(self, identity: bytes, message: AnyMessage) -> None:
        """Send to a peer.

        Dropped if the peer is not connected any more, or does not read and too much waits for it
        already (ZMQ's ROUTER never blocks and raises nothing then); sessions send again.
        """
        data = codec.encode(message, session=self._session)
        self._socket.send_multipart([identity, data], flags=zmq.NOBLOCK)
        # ZMQ tells once that a message has come, and it may just have told the sender.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self.wake()

    def close(self) -> None:
        """Close the channel; what was sent goes out for at most 0.2 s."""
        self._gate.close()
        self._context.destroy()
        os.close(self._wake)


class ControlClients:
    """The producer's end: a connection to each consumer that it has to do with.

    Not for several threads, except `wake`.

    Args:
        session: Of this process.
        keys: Of the deployment.
    """

    def __init__(self, session: str, keys: CurveKeys) -> None:
        self._session = session
        self._keys = keys
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets = Connections(self._connect, self._leave)
        self._addresses: dict[zmq.Socket[bytes], str] = {}
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_in.bind("inproc://wake")
        self._wake_out = self._context.socket(zmq.PAIR)
        self._wake_out.connect("inproc://wake")
        self._poller.register(self._wake_in, zmq.POLLIN)

    def send(self, address: str, message: AnyMessage) -> None:
        """Send to the consumer that listens on ``address``; connects if need be.

        Dropped if so much waits for a consumer that does not read; sessions send again.

        Raises:
            TransportError: The address is none, or this process has no socket left.
        """
        target = self._sockets.use(address)
        with contextlib.suppress(zmq.Again):
            target.send(codec.encode(message, session=self._session), flags=zmq.NOBLOCK)

    def receive(self, timeout_s: float) -> list[tuple[str, AnyMessage]]:
        """Wait for messages or `wake` and return what arrived, as ``(address, message)``."""
        received = []
        for ready, _ in self._poller.poll(int(timeout_s * 1000)):
            for _ in range(MAX_AT_ONCE):
                if not ready.poll(0):
                    break
                parts = receive_parts(ready, most=1)
                if ready is self._wake_in:
                    continue
                try:
                    message, _session = codec.decode_parts(parts)
                except ProtocolError as error:
                    logger.warning(
                        "message from %s dropped: %r", self._addresses[ready], str(error)
                    )
                else:
                    received.append((self._addresses[ready], message))
        return received

    def wake(self) -> None:
        """End a `receive` that waits in another thread; one caller at a time, none during `close`.

        Does nothing after it.
        """
        if self._wake_out.closed:
            return
        with contextlib.suppress(zmq.Again):
            self._wake_out.send(b"", flags=zmq.NOBLOCK)

    def close(self) -> None:
        """Close every connection; what was sent goes out for at most 0.2 s."""
        self._context.destroy()

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
        self._poller.register(target, zmq.POLLIN)
        trace("control.opened", address=address)
        return target

    def _leave(self, target: zmq.Socket[bytes]) -> None:
        self._poller.unregister(target)
        del self._addresses[target]
        target.close()
