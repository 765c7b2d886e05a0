"""Addresses: those that the name of a front has, and the one that others reach this machine by."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from epd_portable.errors import ConfigError, LaunchError

_ELSEWHERE = ("192.0.2.1", 9)
"""Address of no machine (RFC 5737)."""


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
