"""Addresses: those that the name of a router has, and the one that others reach this machine by."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from epd_portable.errors import ConfigError, LaunchError

ELSEWHERE = "192.0.2.1"
"""An address that no machine has: it stands for that of a node which is not chosen yet."""


def addresses_of(url: str) -> list[str]:
    """Return every address that the host of a URL has at this moment, in order.

    IPv4 addresses; IPv6 ones where there are no others.

    Raises:
        LaunchError: It has none.
    """
    host = urlsplit(url).hostname or ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise LaunchError(f"{host} has no address: {error}") from error
    v4 = {str(address[0]) for family, *_, address in found if family == socket.AF_INET}
    return sorted(v4 or {str(address[0]) for *_, address in found})


def require_addresses(routers: Sequence[str]) -> None:
    """Check that the names of routers have addresses.

    Raises:
        ConfigError: One has none.
    """
    for url in routers:
        try:
            addresses_of(url)
        except LaunchError as error:
            raise ConfigError(
                f"router.join {url}: {error}; write the name or address of a router, or of a "
                "headless Service of routers"
            ) from error


def own_address() -> str:
    """Return the IPv4 address that this machine sends from on its default route.

    Raises:
        ConfigError: It has no such route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((ELSEWHERE, 9))  # Sends nothing: the kernel chooses a route.
        except OSError as error:
            raise ConfigError(
                "launch.host: auto: this machine has no default route; write the address of this "
                "machine that others reach, as 10.0.0.2"
            ) from error
        return str(asked.getsockname()[0])
