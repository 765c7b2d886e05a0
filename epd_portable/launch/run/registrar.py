"""``python -m epd_portable.launch.run.registrar``: registers instances at a router elsewhere.

The launcher starts it in place of a router when ``router.join`` names one. It registers each
instance once that is healthy, keeps it registered, and lets all leave at SIGTERM, before the
launcher ends them. Its ``GET /health`` has the form of a router's, with what the router last said
of each instance, and answers 200 when all are up.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from epd_portable.config.secret import Secret
from epd_portable.errors import LaunchError
from epd_portable.launch.plan.processes import RegistrarSettings
from epd_portable.launch.run.router_client import RouterAwayError, RouterClient

_PROBE_TIMEOUT_S = 5.0
_TRY_EVERY_S = 1.0
_STARTING, _GONE = "starting", "gone"
"""States before and after those that the router knows."""


class Registrar:
    """Keeps the instances of one launcher registered at one router."""

    def __init__(self, settings: RegistrarSettings) -> None:
        self._settings = settings
        self._secret = Secret.read(settings.secret_file)
        self._stop = threading.Event()
        self._states: dict[str, dict[str, str]] = {}
        for each in settings.instances:
            self._is(each["name"], _STARTING)

    def run(self) -> None:
        """Serve until `stop`; then let every instance leave."""
        handler = functools.partial(_Health, self)
        server = ThreadingHTTPServer(("127.0.0.1", self._settings.port), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with ThreadPoolExecutor(len(self._settings.instances)) as pool:
            list(pool.map(self._keep_registered, self._settings.instances))
        server.shutdown()

    def stop(self) -> None:
        """Let every instance leave, and end."""
        self._stop.set()

    def health(self) -> tuple[HTTPStatus, bytes]:
        """Return what ``GET /health`` answers."""
        all_up = all(each["state"] == "up" for each in self._states.values())
        status = HTTPStatus.OK if all_up else HTTPStatus.SERVICE_UNAVAILABLE
        return status, json.dumps({"instances": self._states}).encode()

    def _keep_registered(self, instance: Mapping[str, Any]) -> None:
        name, settings = instance["name"], self._settings
        client = RouterClient(settings.router, self._secret)
        said = ""
        while not self._stop.is_set():
            try:
                self._join(client, instance)
            except LaunchError as error:
                if str(error) != said:
                    print(f"{name}: {error}", flush=True)
                    said = str(error)
                self._stop.wait(_TRY_EVERY_S)
                continue
            said = ""
            if not self._stop.is_set():
                self._keep(client, instance)
        if self._states[name]["state"] == _STARTING:
            return
        try:
            client.leave(name, timeout_s=settings.leave_timeout_s)
            print(f"{name} has left {settings.router}", flush=True)
        except LaunchError as error:
            print(f"{name}: {error}", flush=True)

    def _join(self, client: RouterClient, instance: Mapping[str, Any]) -> None:
        """Register an instance once it is healthy: a router forgets unhealthy ones."""
        name, settings = instance["name"], self._settings
        while not _is_healthy(instance["url"]):
            if self._stop.wait(_TRY_EVERY_S):
                return
        seen = client.join(dict(instance), timeout_s=settings.join_timeout_s, until=self._stop)
        self._heard(seen)
        print(f"{name} has joined {settings.router}", flush=True)

    def _keep(self, client: RouterClient, instance: Mapping[str, Any]) -> None:
        """Return at a stop, or when the router has removed an instance that was away for too long.

        A healthy instance was removed on purpose, and is not registered again.
        """
        try:
            client.keep(
                dict(instance),
                until=self._stop,
                say=lambda notice: print(notice.line, flush=True),
                heard=self._heard,
            )
        except RouterAwayError:
            raise
        except LaunchError as error:
            self._is(instance["name"], _GONE, reason=str(error))
            print(error, flush=True)
            if _is_healthy(instance["url"]):
                print(f"{instance['name']} joins again when it is started again", flush=True)
                self._stop.wait()

    def _heard(self, seen: Mapping[str, Any]) -> None:
        """Note what the router says of an instance."""
        self._is(seen["name"], seen["state"], reason=seen["reason"], problem=seen["problem"])

    def _is(self, name: str, state: str, *, reason: str = "", problem: str = "") -> None:
        self._states[name] = {"state": state, "reason": reason, "problem": problem}


class _Health(BaseHTTPRequestHandler):
    def __init__(self, registrar: Registrar, *args: Any) -> None:
        self._registrar = registrar
        super().__init__(*args)

    def do_GET(self) -> None:
        status, body = self._registrar.health()
        self.send_response(status if self.path == "/health" else HTTPStatus.NOT_FOUND)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: it is asked every few seconds."""


def _is_healthy(url: str) -> bool:
    try:
        answer = httpx.get(f"{url}/health", timeout=_PROBE_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == HTTPStatus.OK


def main() -> None:
    """Run until SIGTERM or SIGINT."""
    given = json.loads(sys.argv[sys.argv.index("--settings") + 1])
    registrar = Registrar(RegistrarSettings(**given))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: registrar.stop())
    registrar.run()


if __name__ == "__main__":
    main()
