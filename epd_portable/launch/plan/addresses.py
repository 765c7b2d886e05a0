"""Addresses: those that the name of a front has, and the one that others reach this machine by."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from epd_portable.errors import ConfigError, LaunchError

_REMEDY = "write the address of this machine that others reach, as 10.0.0.2"
_DEFAULT = ("00000000", "00000000")
"""Destination and mask of a default route in ``/proc/net/route``."""
_UP = 1
"""Flag of a route that is used."""


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


def own_address(
    root: Path = Path("/"), interfaces: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return the IPv4 address of the interface that the default route leaves by.

    Args:
        root: Has the folder ``proc``.
        interfaces: IPv4 addresses of each; by default those of this machine.

    Raises:
        ConfigError: There is none, or there are several.
    """
    if interfaces is None:
        interfaces = {
            name: [each.address for each in addresses if each.family == socket.AF_INET]
            for name, addresses in psutil.net_if_addrs().items()
        }
    metrics: dict[str, int] = {}
    for line in (root / "proc/net/route").read_text().splitlines()[1:]:
        name, destination, _, flags, _, _, metric, mask, *_ = line.split()
        if (destination, mask) == _DEFAULT and int(flags, 16) & _UP:
            metrics[name] = min(int(metric), metrics.get(name, int(metric)))
    leave_by = [name for name, metric in metrics.items() if metric == min(metrics.values())]
    if not leave_by:
        raise ConfigError(f"launch.host: auto: this machine has no default route; {_REMEDY}")
    found = [address for name in leave_by for address in interfaces.get(name, ())]
    if len(found) != 1:
        there = ", ".join(found) or "no IPv4 address"
        raise ConfigError(
            f"launch.host: auto: the default route leaves by {' and '.join(leave_by)}, which has "
            f"{there}; {_REMEDY}"
        )
    return found[0]
