"""The control channel: ZMQ sockets that carry `epd_portable.wire` messages.

The consumer listens (ROUTER), producers and the router connect (DEALER). Nothing here blocks.
Everything is encrypted, see `epd_portable.connector.curve`.

On one host *written*, for which requests wait, takes a shorter way (`datagrams`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import uuid
from pathlib import Path

import zmq

from epd_portable.connector.connections import Connections
from epd_portable.connector.curve import CurveGate, CurveKeys, connect_client, receive_parts
from epd_portable.connector.datagrams import DatagramInbox, DatagramOutbox
from epd_portable.connector.registry import paths_within_host
from epd_portable.errors import ProtocolError, TransportError
from epd_portable.log import trace
from epd_portable.wire import codec
from epd_portable.wire.descriptors import PeerDescriptor
from epd_portable.wire.messages import AnyMessage, Grant, Written

logger = logging.getLogger(__name__)

_HIGH_WATER_MARK = 1000
_POLLIN = int(zmq.POLLIN)
_WITHIN_HOST = paths_within_host()
MAX_AT_ONCE = 1000
"""Messages that one call takes in, so that a flood does not keep its caller."""


def new_session() -> str:
    """Return a name for this life of the process, for `process_is_gone` and unique."""
    pid = os.getpid()
    _, start = _process(pid)
    return f"{pid}-{start}-{_pid_namespace()}-{uuid.uuid4().hex[:12]}"


def process_is_gone(session: str) -> bool:
    """Tell whether the process that made a session on this host has certainly ended.

    A zombie has ended, once no thread of it is left: until then a device may write for it. A pid
    that another process was given since does not count, nor does a pid of another namespace (a
    container that shares ``/dev/shm``).
    """
    parts = session.split("-")
    if len(parts) != 4 or not parts[0].isdecimal() or parts[2] != _pid_namespace():
        return False
    pid = int(parts[0])
    try:
        state, start = _process(pid)
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return not _pid_exists(pid)
    return start != parts[1] or (state in ("Z", "X") and threads <= 1)


def is_later_life(later: PeerDescriptor, earlier: PeerDescriptor) -> bool:
    """Tell whether two processes were lives of one instance on one machine, and which began later.

    Instances have names of their own, and whoever starts one again has waited for the end of its
    former processes, or killed them. Of another machine it is not known: the former one may be cut
    off and alive.
    """
    instance, machine = earlier.instance, earlier.host.partition(":")[0]
    if (later.instance, later.host.partition(":")[0]) != (instance, machine):
        return False
    began, began_before = (_began(each.session) for each in (later, earlier))
    return later.session != earlier.session and began >= began_before


def _began(session: str) -> int:
    """Return the clock ticks of the machine at which a session's process began."""
    parts = session.split("-")
    return int(parts[1]) if len(parts) == 4 and parts[1].isdecimal() else 0


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


class _Alarm:
    """Lets one thread wait for messages of sockets that other threads use.

    ZMQ's own poll would use the sockets meanwhile. Their descriptors can be waited for, but tell
    only once that a message has come, and that to whoever uses the socket next.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._ready = select.poll()
        self._ready.register(self._bell, select.POLLIN)

    def watch_descriptor(self, descriptor: int) -> None:
        """Wait until this one can be read from, too; that is told until it was read."""
        self._ready.register(descriptor, select.POLLIN)

    def watch(self, target: zmq.Socket[bytes]) -> None:
        """Wait for messages of this socket, too."""
        self._ready.register(int(target.getsockopt(zmq.FD)), select.POLLIN)
        self.ring()

    def forget(self, target: zmq.Socket[bytes]) -> None:
        """Undo `watch`, before the socket is closed."""
        self._ready.unregister(int(target.getsockopt(zmq.FD)))

    def look_again(self, target: zmq.Socket[bytes]) -> None:
        """Ring if a socket that was just used has a message: it may have told its user of it."""
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
        """Nobody waits any more."""
        with self._lock:
            self._closed = True
            os.close(self._bell)


def _has_message(target: zmq.Socket[bytes]) -> bool:
    return bool(int(target.getsockopt(zmq.EVENTS)) & _POLLIN)


class ControlServer:
    """The consumer's end.

    Args:
        address: ZMQ address to listen on.
        session: Of this process.
        keys: Of the deployment.
        inbox: Where producers of this host are heard too; whoever made it closes it, later.

    Raises:
        TransportError: The address cannot be bound.
    """

    def __init__(
        self, address: str, session: str, keys: CurveKeys, inbox: DatagramInbox | None = None
    ) -> None:
        self._session = session
        self._inbox = inbox
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # Who comes again has lost its former connection, whether that was noticed here or not.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.set_hwm(_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._alarm = _Alarm()
        self._alarm.watch(self._socket)
        if inbox is not None:
            self._alarm.watch_descriptor(inbox.fileno())
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
        self._alarm.wait(timeout_s)

    def wake(self) -> None:
        """End a `wait` in another thread; does nothing after `close`."""
        self._alarm.ring()

    def receive(self) -> list[tuple[bytes, AnyMessage]]:
        """Return what has arrived, as ``(identity, message)``; what is no message is logged.

        At most `MAX_AT_ONCE`; the rest comes with the next call.
        """
        received = self._receive_datagrams()
        for _ in range(MAX_AT_ONCE - len(received)):
            if not _has_message(self._socket):
                break
            identity, *parts = receive_parts(self._socket, most=2)
            try:
                message, _session = codec.decode_parts(parts)
            except ProtocolError as error:
                logger.warning("control message from %r dropped: %r", identity, str(error))
            else:
                received.append((identity, message))
        else:
            self.wake()  # More may have come, of which ZMQ does not tell again.
        if not received:  # Who has the key waits for an answer.
            self._gate.look()
        return received

    def _receive_datagrams(self) -> list[tuple[bytes, AnyMessage]]:
        received: list[tuple[bytes, AnyMessage]] = []
        if self._inbox is None:
            return received
        while len(received) < MAX_AT_ONCE and (data := self._inbox.receive()) is not None:
            try:
                message, session = codec.decode(data)
            except ProtocolError as error:
                logger.warning("datagram dropped: %r", str(error))
            else:
                received.append((session.encode(), message))
        return received

    def send(self, identity: bytes, message: AnyMessage) -> None:
        """Send to a peer.

        Dropped if the peer is not connected any more, or does not read and too much waits for it
        already (ZMQ's ROUTER never blocks and raises nothing then); sessions send again.
        """
        data = codec.encode(message, session=self._session)
        self._socket.send_multipart([identity, data], flags=zmq.NOBLOCK)
        self._alarm.look_again(self._socket)

    def close(self) -> None:
        """Close the channel; what was sent goes out for at most 0.2 s."""
        self._gate.close()
        self._context.destroy()
        self._alarm.close()


class ControlClients:
    """The producer's end: a connection to each consumer that it has to do with.

    For one thread at a time; only `wait` may go on in one while another does the rest, and `wake`
    may come at any time.

    Args:
        session: Of this process.
        keys: Of the deployment.
    """

    def __init__(self, session: str, keys: CurveKeys) -> None:
        self._session = session
        self._keys = keys
        self._context = zmq.Context()
        # With the first socket ZMQ makes threads of its own, which run where their maker does.
        self._context.socket(zmq.DEALER).close()
        self._alarm = _Alarm()
        self._sockets = Connections(self._connect, self._leave)
        self._addresses: dict[zmq.Socket[bytes], str] = {}
        self._near: dict[str, DatagramOutbox] = {}

    def send(self, address: str, message: AnyMessage) -> None:
        """Send to the consumer that listens on ``address``; connects if need be.

        Dropped if so much waits for a consumer that does not read; sessions send again.

        Raises:
            TransportError: The address is none, or this process has no socket left.
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

    def receive(self) -> list[tuple[str, AnyMessage]]:
        """Return what has arrived, as ``(address, message)``; what is no message is logged.

        At most `MAX_AT_ONCE` of each consumer; the rest comes with the next call.
        """
        received = []
        for target, address in self._addresses.items():
            for _ in range(MAX_AT_ONCE):
                if not _has_message(target):
                    break
                parts = receive_parts(target, most=1)
                try:
                    message, _session = codec.decode_parts(parts)
                except ProtocolError as error:
                    logger.warning("message from %s dropped: %r", address, str(error))
                else:
                    received.append((address, message))
                    if isinstance(message, Grant):
                        self._granted(address, message)
            else:
                self.wake()  # More may have come, of which ZMQ does not tell again.
        return received

    def wake(self) -> None:
        """End a `wait` in another thread; does nothing after `close`."""
        self._alarm.ring()

    def close(self) -> None:
        """Close every connection; what was sent goes out for at most 0.2 s."""
        self._context.destroy()
        self._alarm.close()
        for address in list(self._near):
            self._depart(address)

    def _granted(self, address: str, grant: Grant) -> None:
        """Open the short way to a consumer that shares this host, if it is not open."""
        trace("transfer.granted", transfer=grant.transfer_id)
        near, pool = self._near.get(address), grant.slot.pool
        if grant.path not in _WITHIN_HOST or (near is not None and near.pool == pool):
            return
        self._depart(address)
        try:
            self._near[address] = DatagramOutbox(pool)
        except (OSError, ValueError) as error:
            logger.info("no short way to %s: %r", address, str(error))

    def _send_near(self, address: str, data: bytes) -> bool:
        near = self._near.get(address)
        if near is None:
            return False
        try:
            near.send(data)
        except BlockingIOError:
            return False
        except OSError:  # Its owner has gone; the next grant is of another.
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
