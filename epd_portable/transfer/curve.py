"""Encryption of the ZMQ channels between processes (CurveZMQ), and their keep-alive.

Both ends derive the same key pairs from the deployment's secret: one for servers, one for clients.
No handshake begins without the server's public key, which is never published, so servers admit
holders of the secret only. That holds on every address: any user of a machine can connect to its
loopback address.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import zmq
import zmq.utils.monitor
import zmq.utils.z85

from epd_portable.config.secret import Secret
from epd_portable.errors import TransportError

if TYPE_CHECKING:
    from epd_portable.config.instance import InstanceConfig

logger = logging.getLogger(__name__)

ON_HOST = frozenset({"127.0.0.1", "[::1]", "::1", "localhost"})
"""Other loopback addresses, for example 127.0.0.2, count as addresses of a network."""

_REFUSALS = (
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)
OVERHEAD_BYTES = 64
"""More than encryption adds to a frame (33 bytes), for limits on what is received."""

_LOG_EVERY_S = 10.0
_OTHER_KEY = (
    "connections without the key of this deployment: is it the same secret_file at both ends?"
)
_KEEP_ALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 20,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""In seconds. Firewalls between hosts drop idle connections silently, some after a few minutes; a
host that is gone does not close its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveKeys:
    """Key pairs of one deployment, in Z85: one of all servers, one of all clients."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)

    @classmethod
    def derive(cls, secret: Secret) -> CurveKeys:
        """Return the keys of a deployment."""
        server, client = (
            zmq.utils.z85.encode(secret.derive(f"curve {end}")) for end in ("server", "client")
        )
        return cls(
            server_public=zmq.curve_public(server),
            server_secret=server,
            client_public=zmq.curve_public(client),
            client_secret=client,
        )


def read_keys(secret_file: str) -> CurveKeys:
    """Return the keys of a deployment; `ConfigError` if the file cannot be used."""
    return CurveKeys.derive(Secret.read(secret_file))


def is_off_host(address: str) -> bool:
    """Return whether other machines may reach an address, ``tcp://host:port`` or a host alone."""
    scheme, separator, rest = address.rpartition("://")
    if separator and scheme != "tcp":
        return False
    host = rest.rpartition(":")[0] if separator else rest
    return host not in ON_HOST


def may_be_plain(config: InstanceConfig) -> bool:
    """Return whether an instance may use paths that cannot encrypt."""
    return config.trusted_network or not is_off_host(config.host)


def secure_client(socket: zmq.Socket[Any], keys: CurveKeys) -> None:
    """Prepare a socket that will connect; set its ``MAXMSGSIZE`` before."""
    socket.curve_secretkey = keys.client_secret
    socket.curve_publickey = keys.client_public
    socket.curve_serverkey = keys.server_public
    _prepare(socket)


def connect_client(socket: zmq.Socket[Any], address: str, keys: CurveKeys, *, what: str) -> None:
    """Connect a socket, encrypted; closes it and raises `TransportError` if that fails."""
    secure_client(socket, keys)
    try:
        socket.connect(address)
    except (zmq.ZMQError, ValueError) as error:
        socket.close(linger=0)
        raise TransportError(f"{what} {address!r}: {error}") from error


def receive_parts(socket: zmq.Socket[bytes], *, most: int) -> list[bytes]:
    """Return the parts of the next message, at most ``most`` and one, which shows a longer one.

    No option of a ZMQ socket bounds the number of parts.
    """
    parts = [socket.recv()]
    while socket.getsockopt(zmq.RCVMORE):
        part = socket.recv(copy=False)
        if len(parts) <= most:
            parts.append(part.bytes)
    return parts


class Listener:
    """A listening socket (ROUTER), to which only holders of the secret get through.

    Args:
        keys: ``None`` for a socket that encrypts nothing and is open to all.
        name: For messages.
        max_bytes: Largest frame.
        waiting: Most messages of a peer that wait to be read.

    Attributes:
        address: With the port that was chosen for port 0.
        refused: Connections that were refused so far: no key, a wrong one, or no encryption.

    Raises:
        TransportError: The address cannot be bound.
    """

    def __init__(
        self, address: str, keys: CurveKeys | None, *, name: str, max_bytes: int, waiting: int
    ) -> None:
        self._name = f"{name} at {address}"
        self._cause = _OTHER_KEY if keys else "connections that encrypt, which this end does not"
        self.refused = 0
        self._logged = 0
        self._next_log_s = 0.0
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        # A peer that connects again has lost its former connection.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.RCVHWM, waiting)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        self.socket.setsockopt(zmq.LINGER, 200)
        if keys is not None:
            self.socket.curve_secretkey = keys.server_secret
            self.socket.curve_publickey = keys.server_public
            self.socket.curve_server = True
            _prepare(self.socket)
        self._events = self.socket.get_monitor_socket(_REFUSALS)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(
                f"{name} cannot listen on {address}: {error}; free it or take another"
            ) from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def log_refusals(self) -> None:
        """Count and log refusals since the last call."""
        while self._events.poll(0):
            zmq.utils.monitor.recv_monitor_message(self._events)
            self.refused += 1
        now = time.monotonic()
        if self.refused > self._logged and now >= self._next_log_s:
            logger.warning(
                "%s has refused %d %s",
                self._name,
                self.refused - self._logged,
                self._cause,
            )
            self._logged, self._next_log_s = self.refused, now + _LOG_EVERY_S

    def close(self) -> None:
        """Close the socket; lingers for at most 0.2 s."""
        self.socket.disable_monitor()
        self._events.close(linger=0)
        self._context.destroy()


def _prepare(socket: zmq.Socket[Any]) -> None:
    """Keep idle connections alive, and let encrypted frames be as long as plain ones may."""
    for option, value in _KEEP_ALIVE.items():
        socket.setsockopt(option, value)
    largest = int(socket.getsockopt(zmq.MAXMSGSIZE))
    if largest >= 0:
        socket.setsockopt(zmq.MAXMSGSIZE, largest + OVERHEAD_BYTES)
