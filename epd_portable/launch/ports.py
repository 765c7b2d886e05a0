"""Ports of the topology: which are free, and whether the public one is."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from epd_portable.errors import ConfigError, LaunchError, PortInUseError

FIRST_PORT = 20000
LAST_PORT = 29999
"""Below the range that Linux hands to outgoing connections (32768 on), so that none of those takes
a port between its choice and its use."""


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Tell whether a server could listen on ``host:port`` at this moment.

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
    """Take a free port for as long as this process lives; false if another has it.

    What will listen there is started later, and may be started again: until then nobody listens.
    So a name that Linux gives to one process at a time, and takes back when it ends, tells other
    runs that the port is theirs no more.

    Raises:
        ConfigError: As `is_free`.
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
        ConfigError: ``host`` is no address of this machine, or the port needs a privilege.
    """
    if is_free(port, host):
        return
    other = next((p for p in range(port + 1, min(port + 100, 65536)) if is_free(p, host)), None)
    hint = f"take another with --port, {other} is free" if other else "take another with --port"
    raise PortInUseError(
        f"router.port {port} on {host} is in use by another process; {hint}, or stop that process"
    )


def port_source(
    run_id: str,
    *,
    reserved: frozenset[int] = frozenset(),
    host: str = "127.0.0.1",
    free: Callable[[int, str], bool] = claim,
) -> Callable[[], int]:
    """Return a function that hands out one free port after another.

    The search starts at a point that follows from ``run_id``, so that topologies started at the
    same moment rarely meet; where they do, `claim` keeps them apart.

    Args:
        run_id: Hexadecimal id of the run.
        reserved: Ports never to hand out.
        host: Address of this machine whose ports they are.
        free: Tells whether a port of an address may be used, and takes it.

    Raises:
        ConfigError: By the function, as `is_free`.
    """
    allowed = [port for port in range(FIRST_PORT, LAST_PORT + 1) if port not in reserved]
    start = int(run_id, 16) % len(allowed) if allowed else 0
    candidates = iter(allowed[start:] + allowed[:start])

    def next_port() -> int:
        for port in candidates:
            if free(port, host):
                return port
        raise LaunchError(f"no free port of {host} from {FIRST_PORT} to {LAST_PORT} is left")

    return next_port
