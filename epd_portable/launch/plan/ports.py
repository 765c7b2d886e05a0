"""Ports of the topology: which are free, and whether the public one is."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Collection, Iterator

from epd_portable.errors import ConfigError, LaunchError, PortInUseError

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


def require_address(host: str) -> None:
    """Check that a host is an address of this machine.

    Raises:
        ConfigError: It is not.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"launch.host {host} cannot be used here: {error.strerror or error}. Write an "
                "address of this machine, or auto."
            ) from error


def require_free(port: int, host: str) -> None:
    """Check the public port.

    Raises:
        PortInUseError: Another process listens there; names a free port instead.
    """
    if is_free(port, host):
        return
    others = range(port + 1, min(port + 100, HIGHEST_PORT + 1))
    other = next((each for each in others if is_free(each, host)), None)
    hint = "take another with --port" + (f", {other} is free" if other else "")
    raise PortInUseError(
        f"front.port {port} on {host} is in use by another process; {hint}, or stop that process"
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
    candidates = iter(allowed[start:] + allowed[:start])

    def next_port() -> int:
        for port in candidates:
            if free(port, host):
                return port
        raise LaunchError(f"no free port of {host} from {FIRST_PORT} to {LAST_PORT} is left")

    return next_port


def ports_in_order(first: int, *, reserved: Collection[int | None] = ()) -> Callable[[], int]:
    """Return what returns the ports from ``launch.first_port`` on, the same ones every time.

    But for ``reserved`` ones. It raises `ConfigError` where there is none above the last.
    """

    def ports() -> Iterator[int]:
        yield from (port for port in range(first, HIGHEST_PORT + 1) if port not in reserved)
        raise ConfigError(
            f"launch.first_port {first} leaves too few ports for all instances: "
            f"{HIGHEST_PORT} is the highest; lower it"
        )

    return ports().__next__
