"""Options of sockets that a library opened in this process and does not expose."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

_OWN = Path("/proc/self/fd")
_SOON = struct.pack("ll", 0, 1000)
_RESET = struct.pack("ii", 1, 0)
_ANY_PORT = 9
_EVERYWHERE = ("0.0.0.0", "::")
_LOOPBACK = b"lo\0"
_CLOSE_WAIT = 8
"""Of Linux, in the first byte of a connection's TCP_INFO."""


def open_ports() -> frozenset[int]:
    """Return the TCP ports on which this process listens on all interfaces."""
    names = (each.getsockname()[:2] for each in _listening())
    return frozenset(port for address, port in names if address in _EVERYWHERE)


def keep_on_host(ports: Collection[int]) -> None:
    """Let only this host connect to ports that this process listens on; may raise `OSError`."""
    for each in _listening():
        if each.getsockname()[1] in ports:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK)


def hasten_accepts(port: int) -> None:
    """Let ``accept`` on a port block for a millisecond at most from now on."""
    for each in _listening():
        if each.getsockname()[1] == port:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SOON)
    # A call that blocks already keeps its former timeout: end it.
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()


def reset_on_close(host: str, ports: Collection[int]) -> None:
    """Discard unsent bytes of connections to these ports of a host when they are closed.

    Otherwise the kernel goes on to deliver them.
    """
    for each in _connected(host, ports):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def has_hung_up(host: str, ports: Collection[int]) -> bool:
    """Return whether any of these ports of a host has closed a connection that is open here."""
    states = (
        each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        for each in _connected(host, ports)
    )
    return any(state == _CLOSE_WAIT for state in states)


def local_host_towards(host: str) -> str:
    """Return this machine's address towards a host; `OSError` if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))  # Sends nothing.
        local: str = probe.getsockname()[0]
        return local


def _connected(host: str, ports: Collection[int]) -> Iterator[socket.socket]:
    try:
        addresses = {found[4][0] for found in socket.getaddrinfo(host, None)}
    except OSError:
        return  # There can be no connection to it.
    for each in _tcp():
        with contextlib.suppress(OSError):  # Not connected, or closed meanwhile.
            address, port = each.getpeername()[:2]
            if port in ports and address in addresses:
                yield each


def _listening() -> Iterator[socket.socket]:
    for each in _tcp():
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield each


def _tcp() -> Iterator[socket.socket]:
    for file in os.listdir(_OWN):
        # This listing's own descriptor is closed by now.
        with contextlib.suppress(OSError):
            if os.readlink(_OWN / file).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(file))) as found:
                    internet = found.family in (socket.AF_INET, socket.AF_INET6)
                    if internet and found.type == socket.SOCK_STREAM:
                        yield found
