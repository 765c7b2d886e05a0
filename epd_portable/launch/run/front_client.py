"""Client of a front's ``/epd/`` addresses, with signed requests."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from epd_portable.config.secret import Secret
from epd_portable.errors import LaunchError, RefusedError

_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5.0
_FINAL = frozenset({400, 401, 403, 404})
"""Statuses of refusals that only another setting changes. A name is free again later (409)."""


def trusting(cert_file: str) -> ssl.SSLContext:
    """Return a context that accepts the certificate of a PEM file, for any host name."""
    context = ssl.create_default_context(cafile=cert_file)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


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


class FrontClient:
    """Sends signed requests to one front.

    Methods raise `LaunchError` if it cannot be reached, or refuses; that is `RefusedError` if it
    would refuse again.

    Args:
        url: Base address of the front, with or without ``/v1``.
        address: Which of the addresses of its name is meant; empty for any of them.
        cert_file: Certificate of a front on this machine, read for each request: it may be renewed.
            By default the system's authorities are trusted.
    """

    def __init__(self, url: str, secret: Secret, *, address: str = "", cert_file: str = "") -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._address = address
        self._cert_file = cert_file
        self._secret = secret
        self._verify: ssl.SSLContext | bool = False
        if self._url.startswith("https") and not cert_file:
            # For all requests: to read the system's certificates takes 30 ms of CPU.
            self._verify = httpx.create_ssl_context()

    def __str__(self) -> str:
        """Return the URL, and which of its addresses is meant."""
        named = self._address and self._address != httpx.URL(self._url).host
        return f"{self._url} at {self._address}" if named else self._url

    def instances(self) -> list[dict[str, Any]]:
        """Return what the front reports of each of its instances."""
        return self.look()[1]

    def look(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the id of the front process, and what it reports of each of its instances."""
        answer = self.request("GET")
        try:
            return answer["front"], answer["instances"]
        except LookupError as error:
            raise LaunchError(
                f"front {self}: no instances in its response. Check the address."
            ) from error

    def register(self, instance: Mapping[str, Any]) -> str:
        """Register an instance (fields of `EngineSettings`); return the front process's id."""
        front: str = self.request("POST", content=instance)["front"]
        return front

    def request(
        self, method: str, path: str = "", content: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send a request to a path below ``/epd/instances``, and return the response."""
        data = json.dumps(content).encode() if content is not None else b""
        timeout = httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        try:
            verify = trusting(self._cert_file) if self._cert_file else self._verify
            url = httpx.URL(f"{self._url}/epd/instances{path}")
            headers = {
                "host": url.netloc.decode(),
                "authorization": self._secret.sign(method, url.raw_path.decode(), data),
                "content-type": "application/json",
            }
            with httpx.Client(timeout=timeout, trust_env=False, verify=verify) as client:
                answer = client.request(
                    method,
                    url.copy_with(host=self._address) if self._address else url,
                    content=data,
                    headers=headers,
                    extensions={"sni_hostname": url.host},  # Certificates are for the name.
                )
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise LaunchError(f"front {self} cannot be reached: {error}") from error
        try:
            body: dict[str, Any] = answer.json()
            if answer.is_success:
                return body
            reason = body["error"]["message"]
        except (ValueError, LookupError, TypeError) as error:
            raise LaunchError(
                f"front {self}: status {answer.status_code}, and not the response of a front: "
                f"{answer.text[:200]!r}. Check the address."
            ) from error
        final = answer.status_code in _FINAL
        raise (RefusedError if final else LaunchError)(f"front {self}: {reason}")
