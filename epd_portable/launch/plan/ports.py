"""Ports and addresses of this machine: which are free, and the one that others reach it by."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Collection, Iterator
from functools import partial

from epd_portable.errors import ConfigError, EPDError, LaunchError, PortInUseError

_ELSEWHERE = ("192.0.2.1", 9)
"""Address of no machine (RFC 5737)."""
FIRST_PORT = 20000
LAST_PORT = 29999
"""Below the range that Linux hands to outgoing connections (32768 on), so that none of those takes
a port between its choice and its use."""
HIGHEST_PORT = 65535


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a server could listen on ``host:port`` at this moment.

    Raises:
        ConfigError: ``host`` is no address of this machine, or the port needs a privilege.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            # Several sockets may be bound with SO_REUSEADDR, but only one may listen.
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise ConfigError(
            f"host {host}, port {port}: cannot listen there: {error.strerror or error}; "
            "use an address of this machine and a port that you may open"
        ) from error
    return True


def claim(port: int, host: str = "127.0.0.1") -> bool:
    """Reserve a free port for as long as this process lives; false if another run has it.

    What will listen there is started later, and may be restarted. So an abstract Unix address,
    which one process has at a time and loses when it ends, marks the port for other runs.
    """
    if not is_free(port, host):
        return False
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0epd-portable-port-{port}")
    except OSError:
        name.close()
        return False
    name.detach()  # Open until the process ends.
    return True


def require_free(port: int, host: str) -> None:
    """Check the public port.

    Raises:
        PortInUseError: Another process listens there; names a free port instead.
    """
    if not is_free(port, host):
        others = range(port + 1, min(port + 100, HIGHEST_PORT + 1))
        other = next((f", {each} is free" for each in others if is_free(each, host)), "")
        raise PortInUseError(
            f"front.port {port} on {host} is in use by another process; take another with --port"
            f"{other}, or stop that process"
        )


def port_source(
    run_id: str,
    *,
    reserved: Collection[int | None] = (),
    host: str = "127.0.0.1",
    free: Callable[[int, str], bool] = claim,
) -> Callable[[], int]:
    """Return a function that returns one free port of ``host`` after another.

    The search starts at a point that follows from ``run_id``, so that topologies started at the
    same moment rarely meet; where they do, `claim` keeps them apart.
    """
    allowed = [port for port in range(FIRST_PORT, LAST_PORT + 1) if port not in reserved]
    start = int(run_id, 16) % len(allowed)
    ports = (port for port in allowed[start:] + allowed[:start] if free(port, host))
    problem = f"no free port of {host} from {FIRST_PORT} to {LAST_PORT} is left"
    return partial(_next, ports, LaunchError(problem))


def ports_in_order(first: int, *, reserved: Collection[int | None] = ()) -> Callable[[], int]:
    """Return what returns the ports from ``launch.first_port`` on, but for ``reserved`` ones."""
    ports = (port for port in range(first, HIGHEST_PORT + 1) if port not in reserved)
    problem = (
        f"launch.first_port {first} leaves too few ports for all instances: {HIGHEST_PORT} is the "
        "highest; lower it"
    )
    return partial(_next, ports, ConfigError(problem))


def _next(ports: Iterator[int], at_end: EPDError) -> int:
    for port in ports:
        return port
    raise at_end


def own_address() -> str:
    """Return the IPv4 address by which this machine reaches others: that of its default route.

    Raises:
        ConfigError: There is no such route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)  # Chooses an address; sends nothing.
        except OSError as error:
            raise ConfigError(
                f"launch.host: auto: this machine has no default route ({error.strerror}). Write "
                "the address of this machine that others reach, as 10.0.0.2."
            ) from error
        return str(probe.getsockname()[0])
