"""Client of a front's ``/epd/`` addresses: instances join, leave, and are drained and resumed."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from epd_portable.config.secret import Secret
from epd_portable.errors import LaunchError, RefusedError
from epd_portable.launch.plan.addresses import addresses_of
from epd_portable.launch.run.wait import Wait

T = TypeVar("T")

_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.2
_FINAL = frozenset({400, 401, 403, 404})
"""Statuses of refusals that only another setting changes. A name is free again later (409)."""
_MOST_FRONTS = 64
"""Asked at the same time."""


def trusting(cert_file: str) -> ssl.SSLContext:
    """Return a context that accepts the certificate of a PEM file, for any host name."""
    context = ssl.create_default_context(cafile=cert_file)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


class FrontClient:
    """Sends signed requests to one front.

    Methods raise `LaunchError` if it cannot be reached, or refuses; that is `RefusedError` if it
    would refuse again.

    Args:
        url: Base address of the front, with or without ``/v1``.
        address: Which of the addresses of its name is meant; empty for any of them.
        cert_file: Certificate of a front on this machine; by default the system's CAs are trusted.

    Raises:
        LaunchError: The certificate cannot be used.
    """

    def __init__(self, url: str, secret: Secret, *, address: str = "", cert_file: str = "") -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._address = address
        try:
            self._verify: ssl.SSLContext | bool = False
            if cert_file or self._url.startswith("https"):
                # For all requests: to read the system's certificates takes 30 ms of CPU.
                self._verify = trusting(cert_file) if cert_file else httpx.create_ssl_context()
        except OSError as error:
            raise LaunchError(f"certificate {cert_file} cannot be used: {error}") from error
        self._secret = secret

    def __str__(self) -> str:
        """Return the URL, and which of its addresses is meant."""
        named = self._address and self._address != httpx.URL(self._url).host
        return f"{self._url} at {self._address}" if named else self._url

    def instances(self, *, timeout_s: float = _TIMEOUT_S) -> list[dict[str, Any]]:
        """Return what the front says of each of its instances."""
        answer = self._request("GET", "/epd/instances", timeout_s=timeout_s)
        found: list[dict[str, Any]] | None = answer.get("instances")
        if found is None:
            raise LaunchError(f"front {self}: no instances in its response. Check the address.")
        return found

    def find_instance(self, name: str) -> tuple[str, dict[str, Any] | None]:
        """Return the id of the front process, and what it says of an instance that it knows."""
        answer = self._request("GET", "/epd/instances")
        found = (each for each in answer["instances"] if each["name"] == name)
        return answer["front"], next(found, None)

    def register(self, instance: Mapping[str, Any]) -> str:
        """Register an instance (fields of `InstanceSettings`); return the front process's id."""
        front: str = self._request("POST", "/epd/instances", instance)["front"]
        return front

    def wait_up(self, name: str, *, timeout_s: float, until: threading.Event) -> dict[str, Any]:
        """Wait until the front has warmed an instance up, and sends it clients' requests.

        ``until`` ends the wait. Returns what the front says of the instance.

        Raises:
            LaunchError: It is not up in time.
        """
        seen = self._look(name)
        wait = Wait(f"{name} is not up at front {self}, which goes on trying,", timeout_s)
        while seen["state"] != "up":
            wait.go_on(f"{seen['state']}{seen['reason'] and ': ' + seen['reason']}")
            if until.wait(_LOOK_EVERY_S):
                break
            seen = self._look(name)
        return seen

    def drain(self, name: str, *, timeout_s: float, until: threading.Event) -> bool:
        """Send an instance no new requests, and wait for its open ones; return whether it is idle.

        ``until`` ends the wait.
        """
        self._request("POST", f"/epd/instances/{name}/drain")
        deadline_s = time.monotonic() + timeout_s
        while not self._look(name)["idle"]:
            if time.monotonic() >= deadline_s or until.wait(_LOOK_EVERY_S):
                return False
        return True

    def resume(self, name: str) -> None:
        """Undo `drain`: the instance gets requests as soon as it is healthy."""
        self._request("POST", f"/epd/instances/{name}/resume")

    def leave(self, name: str, *, timeout_s: float) -> None:
        """Remove an instance and wait for its open requests.

        Raises:
            LaunchError: It still works on some after the time.
        """
        seen: dict[str, Any] | None = self._request("DELETE", f"/epd/instances/{name}")
        wait = Wait(f"{name} gets no new requests, and has not left front {self}", timeout_s)
        while seen is not None:
            wait.go_on(f"{seen['in_flight']} requests are open. Repeat before you end it.")
            time.sleep(_LOOK_EVERY_S)
            _, seen = self.find_instance(name)

    def _look(self, name: str) -> dict[str, Any]:
        """Return what the front reports of an instance that it has."""
        _, seen = self.find_instance(name)
        if seen is None:
            raise LaunchError(f"front {self} does not know {name} any more")
        return seen

    def _request(
        self,
        method: str,
        path: str,
        content: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = _TIMEOUT_S,
    ) -> dict[str, Any]:
        data = json.dumps(content).encode() if content is not None else b""
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))
        try:
            url = httpx.URL(self._url + path)
            signature = self._secret.sign(method, url.raw_path.decode(), data)
            with httpx.Client(timeout=timeout, trust_env=False, verify=self._verify) as client:
                answer = client.request(
                    method,
                    url.copy_with(host=self._address) if self._address else url,
                    content=data,
                    headers={
                        "host": url.netloc.decode(),
                        "authorization": signature,
                        "content-type": "application/json",
                    },
                    # Certificates are for the name.
                    extensions={"sni_hostname": url.host},
                )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise LaunchError(f"front {self} cannot be reached: {error}") from error
        try:
            body: dict[str, Any] = answer.json()
            if answer.is_success:
                return body
            reason = body["error"]["message"]
        except (ValueError, LookupError, TypeError) as error:
            raise LaunchError(
                f"front {self} answered {answer.status_code}, and not as a front does: is it "
                f"one? It said {answer.text[:200]!r}"
            ) from error
        final = answer.status_code in _FINAL
        raise (RefusedError if final else LaunchError)(f"front {self}: {reason}")


class FrontClients:
    """Several fronts, which are asked the same at the same time.

    Args:
        urls: Base addresses of fronts, or of names that several of them have.
        cert_file: See `FrontClient`.
    """

    def __init__(self, urls: Iterable[str], secret: Secret, *, cert_file: str = "") -> None:
        self._urls = tuple(urls)
        self._secret = secret
        self._cert_file = cert_file

    def each(self, call: Callable[[FrontClient], T]) -> list[T]:
        """Return what a call of each returns, when all have answered.

        Raises:
            LaunchError: One of them does.
        """
        clients = [
            FrontClient(url, self._secret, address=address, cert_file=self._cert_file)
            for url in self._urls
            for address in addresses_of(url)
        ]
        with ThreadPoolExecutor(_MOST_FRONTS) as pool:
            return list(pool.map(call, clients))
