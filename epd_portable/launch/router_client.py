"""Registering instances at a router over HTTP, and keeping them registered."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from epd_portable.config.secret import Secret
from epd_portable.errors import LaunchError

_REQUEST_TIMEOUT_S = 30.0
_LOOK_EVERY_S = 0.2
_KEEP_EVERY_S = 2.0


class RouterAwayError(LaunchError):
    """A router cannot be reached."""


class RouterClient:
    """Speaks to the ``/epd/`` addresses of one router.

    Args:
        url: Base address of the router, with or without ``/v1``.
        secret: Of the deployment.
    """

    def __init__(self, url: str, secret: Secret) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._secret = secret
        self._joined = ""  # the router process at which `join` has registered

    def instances(self) -> list[dict[str, Any]]:
        """Return what the router says of each of its instances.

        Raises:
            RouterAwayError: It cannot be reached.
            LaunchError: It refuses; says why.
        """
        found: list[dict[str, Any]] = self._ask("GET", "/epd/instances")["instances"]
        return found

    def join(
        self, instance: dict[str, str], *, timeout_s: float, until: threading.Event
    ) -> dict[str, Any]:
        """Register an instance and wait until the router has warmed it up.

        Args:
            instance: ``name``, ``role``, ``url`` and ``control``.
            timeout_s: Longest wait.
            until: Ends the wait.

        Returns:
            What the router says of it.

        Raises:
            LaunchError: As `instances`; or it is not up in time.
        """
        seen = self._register(instance)
        deadline_s = time.monotonic() + timeout_s
        while seen["state"] != "up" and not until.is_set():
            if time.monotonic() >= deadline_s:
                raise LaunchError(
                    f"{seen['name']} has registered and is still {seen['state']} after "
                    f"{timeout_s:g} s{seen['reason'] and ': ' + seen['reason']}; the router "
                    "goes on trying"
                )
            until.wait(_LOOK_EVERY_S)
            seen = self._find(seen["name"]) or seen
        return seen

    def keep(
        self, instance: dict[str, str], *, until: threading.Event, say: Callable[[str], None]
    ) -> None:
        """Register an instance again with every router process that comes to this address.

        Args:
            instance: As for `join`, which it has done.
            until: Ends it.
            say: Called with a line when the router goes away, and when the instance is back.

        Raises:
            LaunchError: A router refuses; or the one that had the instance has let it go, because
                somebody told it to or because the instance was away for too long.
        """
        name, away = instance["name"], False
        while not until.is_set():
            try:
                there = self._ask("GET", "/epd/instances")
                if not any(each["name"] == name for each in there["instances"]):
                    if there["router"] == self._joined:
                        raise LaunchError(f"router {self._url} has let {name} go")
                    self._register(instance)
                    say(f"{name} has joined again: the router has restarted")
                away = False
            except RouterAwayError as error:
                if not away:
                    say(f"{error}; still trying")
                away = True
            until.wait(_KEEP_EVERY_S)

    def leave(self, name: str, *, timeout_s: float) -> None:
        """Let an instance go and wait until nothing of it is needed.

        Raises:
            LaunchError: As `instances`; or it still works on something after the time.
        """
        seen: dict[str, Any] | None = self._ask("DELETE", f"/epd/instances/{name}")
        deadline_s = time.monotonic() + timeout_s
        while seen is not None:
            if time.monotonic() >= deadline_s:
                raise LaunchError(
                    f"{name} gets nothing more, and works on {seen['in_flight']} requests still "
                    f"after {timeout_s:g} s: ask again before you end it"
                )
            time.sleep(_LOOK_EVERY_S)
            seen = self._find(name)

    def _find(self, name: str) -> dict[str, Any] | None:
        return next((seen for seen in self.instances() if seen["name"] == name), None)

    def _register(self, instance: dict[str, str]) -> dict[str, Any]:
        seen = self._ask("POST", "/epd/instances", json.dumps(instance).encode())
        self._joined = seen["router"]
        return seen

    def _ask(self, method: str, path: str, sent: bytes = b"") -> dict[str, Any]:
        try:
            answer = httpx.request(
                method,
                self._url + path,
                content=sent,
                headers={"authorization": self._secret.sign(method, path, sent)},
                timeout=_REQUEST_TIMEOUT_S,
                trust_env=False,
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RouterAwayError(f"router {self._url} cannot be reached: {error}") from error
        try:
            body: dict[str, Any] = answer.json()
        except ValueError as error:
            raise LaunchError(
                f"{self._url}{path} answered {answer.status_code} and no JSON: is it a router?"
            ) from error
        if not answer.is_success:
            reason = body.get("error", {}).get("message", answer.text)
            raise LaunchError(f"router {self._url}: {reason}")
        return body
