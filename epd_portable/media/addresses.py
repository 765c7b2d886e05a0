"""From where media may be fetched: what an address on the web must look like, and which machines.

Pure. A URL is taken apart once and used in these parts only, so no other parser can understand it
differently. Everything unusual in it is refused.

Which addresses are public is the word of IANA's registries of special-purpose addresses for IPv4
and IPv6 (https://www.iana.org/assignments/iana-ipv4-special-registry and -ipv6-), not of Python,
whose releases differ about it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import quote, urljoin

import msgspec

from epd_portable.errors import RequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_URL_CHARS = 4096
MAX_HOST_CHARS = 253
PORTS = {"http": 80, "https": 443}
"""Default port of each scheme, and the only port that an entry without a port allows."""
_MAX_SHOWN_CHARS = 120


def _table(text: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(each) for each in text.split())


_NEVER = _table(
    """
    0.0.0.0/8 169.254.0.0/16 224.0.0.0/4 255.255.255.255/32 100.100.100.200/32 168.63.129.16/32
    192.0.0.192/32 ::/128 fe80::/10 fec0::/10 ff00::/8 fd00:ec2::/32 fd20:ce::254/128
    2002:a9fe::/32
    """
)
"""Networks that no setting opens: unspecified, multicast, link-local (also in 6to4), broadcast, and
metadata services of clouds."""
_NOT_PUBLIC_4 = _table(
    """
    10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24
    192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4
    """
)
_PUBLIC_6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_6 = _table("2001::/23 2001:db8::/32 2002::/16 3fff::/20")
"""Teredo is in the first, 6to4 the third: another address is in those."""
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""Prefixes by which a network without IPv4 translates IPv4 addresses (NAT64)."""
_ISATAP = frozenset({0x00005EFE, 0x02005EFE})
"""Third quarter of addresses that have an IPv4 address as the fourth."""

_WEB = re.compile(r"(https?):", re.IGNORECASE)
_URL = re.compile(r"(https?)://([^/?#]*)([^#]*)(?:#.*)?", re.IGNORECASE)
_BRACKETS = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::([^:]*))?")
_NAME = re.compile(r"([^:\[\]]*)(?::([^:]*))?")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f-\x9f\ud800-\udfff\\]")
_KEPT = "/?%:@!$&'()*+,;=~-._[]"


class MediaUrlError(RequestError):
    """Media are not fetched, or could not be; the caller names the item."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "media_url_refused",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message, status=status, code=code, retry_after_s=retry_after_s)


def in_url(host: str) -> str:
    """Return a host as it stands before a port: addresses of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


class WebTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Target of a URL; equal targets are the same.

    Attributes:
        scheme: ``http`` or ``https``.
        host: Name in lower case without a final dot, or address in its usual form, IPv6 too
            without brackets.
        path: With the query; ASCII.
        address: Of a host that is no name.
    """

    scheme: str
    host: str
    port: int
    path: str
    address: Address | None = None

    @property
    def authority(self) -> str:
        """Host and port as a URL has them."""
        host = in_url(self.host)
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """Return the whole."""
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def shown(self) -> str:
        """Return what may stand in messages and logs: queries can hold what signs them."""
        path, question, _ = self.path.partition("?")
        whole = f"{self.scheme}://{self.authority}{path}"
        cut = len(whole) > _MAX_SHOWN_CHARS
        return whole[:_MAX_SHOWN_CHARS] + ("…" if cut else "?…" if question else "")


def is_web(url: bytes) -> bool:
    """Return whether a text begins as an ``http`` or ``https`` URL."""
    return _WEB.match(url[:6].decode("latin-1")) is not None


def read_url(text: str) -> WebTarget:
    """Take a URL apart.

    Raises:
        MediaUrlError: It is none of ``http`` or ``https``, or an unusual one, which the message
        names.
    """
    if len(text) > MAX_URL_CHARS:
        raise MediaUrlError(f"a URL may have {MAX_URL_CHARS} characters, and this has {len(text)}")
    if _UNPRINTABLE.search(text):
        raise MediaUrlError(
            "a URL holds no spaces, backslashes or control characters; write them as %20 and so on"
        )
    parts = _URL.fullmatch(text)
    if parts is None:
        raise MediaUrlError("it is no http or https URL with a host")
    scheme, authority, path = parts[1].lower(), parts[2], parts[3]
    host, port, address = _host(authority, scheme)
    if not path.startswith("/"):
        path = "/" + path
    path = quote(path, safe=_KEPT)
    return WebTarget(scheme=scheme, host=host, port=port, path=path, address=address)


def redirected(target: WebTarget, location: str) -> WebTarget:
    """Return where a redirect leads.

    Raises:
        MediaUrlError: There it is not followed.
    """
    if len(location) > MAX_URL_CHARS or _UNPRINTABLE.search(location):
        raise MediaUrlError("it redirects to what is no URL")
    try:
        joined = urljoin(target.url, location)
    except ValueError:
        raise MediaUrlError("it redirects to what is no URL") from None
    try:
        there = read_url(joined)
    except MediaUrlError as error:
        raise MediaUrlError(f"it redirects to a URL that is refused: {error}") from None
    if target.scheme == "https" and there.scheme == "http":
        raise MediaUrlError("it redirects from https to http")
    return there


def _host(authority: str, scheme: str) -> tuple[str, int, Address | None]:
    if "@" in authority:
        raise MediaUrlError("a URL with a user or password is not fetched; leave them out")
    if not authority.isascii():
        raise MediaUrlError(
            "its host has characters beyond ASCII; write the name in its ASCII form, xn--…"
        )
    address: Address | None = None
    if match := _BRACKETS.fullmatch(authority):
        try:
            address = ipaddress.IPv6Address(match[1])
        except ValueError:
            raise MediaUrlError("its host is no IPv6 address") from None
        host = str(address)
    elif match := _NAME.fullmatch(authority):
        host = match[1].lower()
        host = host[:-1] if host.endswith(".") else host
        try:
            address = ipaddress.IPv4Address(host)
        except ValueError:
            _check_name(host)
    else:
        raise MediaUrlError("its host is neither a name nor an address")
    return host, _port(match[2], scheme), address


def _check_name(host: str) -> None:
    if len(host) > MAX_HOST_CHARS:
        raise MediaUrlError(f"its host has {len(host)} characters: no name has")
    labels = host.split(".")
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise MediaUrlError("its host is neither a name nor an address")
    if _NUMBER.fullmatch(labels[-1]):
        raise MediaUrlError("its host is an address in another form than four decimal numbers")


def _port(text: str | None, scheme: str) -> int:
    if text is None:
        return PORTS[scheme]
    if not _PORT.fullmatch(text) or int(text) > 65535:
        raise MediaUrlError("its port is no number from 1 to 65535")
    return int(text)


class Domains:
    """Hosts that are allowed.

    Args:
        entries: Names and addresses, each with a port perhaps: ``media.example.com``,
            ``*.example.com`` for all names below, ``*`` for every name, ``[2001:db8::1]:8080``.

    Raises:
        ValueError: One of them is none of these; names which.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._exact: set[tuple[str, int | None]] = set()
        self._endings: list[tuple[str, int | None]] = []
        for entry in entries:
            below = entry.startswith("*.")
            every = entry == "*" or entry.startswith("*:")
            name = entry[2:] if below else "any" + entry[1:] if every else entry
            try:
                host, port, _ = _host(name, "http")
            except MediaUrlError as error:
                raise ValueError(
                    f"{entry!r}: {error}; write for example media.example.com, *.example.com, "
                    "* or media.example.com:8080"
                ) from None
            given = None if entry.endswith("]") or ":" not in entry else port
            if below or every:
                self._endings.append(("." + host if below else "", given))
            else:
                self._exact.add((host, given))

    def check(self, target: WebTarget) -> None:
        """Check that a host is among them, at a port that is.

        Raises:
            MediaUrlError: It is not; names the setting.
        """
        given = None if target.port in PORTS.values() else target.port
        if (target.host, given) in self._exact or (target.host, target.port) in self._exact:
            return
        if target.address is None:
            for ending, port in self._endings:
                if port in (given, target.port) and target.host.endswith(ending):
                    return
        raise MediaUrlError(
            f"host {target.host[:80]!r} at port {target.port} is not among "
            "front.media.urls.allowed_domains"
        )


class AddressPolicy:
    """Addresses that may be connected to: public ones, and the configured ones.

    Args:
        networks: Others, as ``10.1.0.0/16``.
    """

    def __init__(self, networks: Iterable[str] = ()) -> None:
        self._allowed = tuple(ipaddress.ip_network(each) for each in networks)

    def allows(self, text: str) -> bool:
        """Return whether an address, as the system writes it, may be connected to."""
        try:
            address: Address = ipaddress.ip_address(text)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address):
            if address.scope_id is not None:
                return False
            address = _within(address) or address
        if any(address in network for network in _NEVER):
            return False
        return _is_public(address) or any(address in network for network in self._allowed)


def _within(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the address that the network connects to in place of one that only wraps it."""
    if address in _TRANSLATED:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    return (
        address in _PUBLIC_6
        and not any(address in network for network in _NOT_PUBLIC_6)
        and int(address) >> 32 & 0xFFFFFFFF not in _ISATAP
    )
