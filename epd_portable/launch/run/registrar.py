"""``python -m epd_portable.launch.run.registrar``: registers instances at routers elsewhere.

The launcher starts it in place of a router when ``router.join`` names some. It registers each
instance at each of them once that is healthy, keeps it registered, and lets all leave at SIGTERM,
before the launcher ends them. Its ``GET /health`` has the form of a router's, with what the routers
last said of each instance, and answers 200 when all are up at all of them.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from epd_portable.config.secret import Secret
from epd_portable.errors import LaunchError
from epd_portable.launch.plan.processes import RegistrarSettings
from epd_portable.launch.run.router_client import RouterClient

_PROBE_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 1.0
_STARTING, _GONE = "starting", "gone"
"""States before and after those that the router knows."""


class Registrar:
    """Keeps the instances of one launcher registered at one router.

    Args:
        settings: Of the launcher.
        router: Base address.
        stop: Lets every instance leave.

    Attributes:
        states: What the router last said of each instance, by name.
    """

    def __init__(self, settings: RegistrarSettings, router: str, stop: threading.Event) -> None:
        self._settings = settings
        self._router = router
        self._secret = Secret.read(settings.secret_file)
        self._stop = stop
        self.states: dict[str, dict[str, str]] = {}
        for each in settings.instances:
            self._set_state(each["name"], _STARTING)

    def run(self) -> None:
        """Register the instances until the stop, and return when all have left."""
        with ThreadPoolExecutor(len(self._settings.instances)) as pool:
            list(pool.map(self._keep_registered, self._settings.instances))

    def _keep_registered(self, instance: Mapping[str, Any]) -> None:
        """Register an instance when it is healthy, and again with every restart of the router."""
        name = instance["name"]
        client = RouterClient(self._router, self._secret)
        registered = ""  # the router process that has the instance
        said = ""
        while not self._stop.is_set():
            try:
                router, seen = client.find_instance(name)
                if registered and seen is not None:
                    self._note_state(seen)
                elif registered == router:
                    self._removed(instance)
                    registered = ""
                elif _is_healthy(instance["url"]):  # A router forgets unhealthy ones.
                    again = " again: the router has restarted" if registered else ""
                    registered = client.register(instance)
                    timeout_s = self._settings.join_timeout_s
                    self._note_state(client.wait_up(name, timeout_s=timeout_s, until=self._stop))
                    print(f"{name} has joined {self._router}{again}", flush=True)
                said = ""
            except LaunchError as error:
                if str(error) != said:
                    print(f"{name}: {error}", flush=True)
                    said = str(error)
            self._stop.wait(_LOOK_EVERY_S)
        if not registered:
            return
        try:
            client.leave(name, timeout_s=self._settings.leave_timeout_s)
            print(f"{name} has left {self._router}", flush=True)
        except LaunchError as error:
            print(f"{name}: {error}", flush=True)

    def _removed(self, instance: Mapping[str, Any]) -> None:
        """Return at once if the router has removed an instance that was away for too long.

        A healthy one was removed on purpose, and is not registered again.
        """
        reason = f"router {self._router} has removed {instance['name']}"
        self._set_state(instance["name"], _GONE, reason=reason)
        print(reason, flush=True)
        if _is_healthy(instance["url"]):
            print(f"{instance['name']} joins again when it is started again", flush=True)
            self._stop.wait()

    def _note_state(self, seen: Mapping[str, Any]) -> None:
        """Note what the router says of an instance."""
        self._set_state(seen["name"], seen["state"], reason=seen["reason"], problem=seen["problem"])

    def _set_state(self, name: str, state: str, *, reason: str = "", problem: str = "") -> None:
        self.states[name] = {"state": state, "reason": reason, "problem": problem}


class _Health(BaseHTTPRequestHandler):
    def __init__(self, registrars: Sequence[Registrar], *args: Any) -> None:
        self._registrars = registrars
        super().__init__(*args)

    def do_GET(self) -> None:
        shown: dict[str, dict[str, str]] = {}
        for registrar in self._registrars:
            for name, seen in registrar.states.items():
                if shown.get(name, {"state": "up"})["state"] == "up":
                    shown[name] = seen
        all_up = all(each["state"] == "up" for each in shown.values())
        status = HTTPStatus.OK if all_up else HTTPStatus.SERVICE_UNAVAILABLE
        body = json.dumps({"instances": shown}).encode()
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
    settings = RegistrarSettings(**json.loads(sys.argv[sys.argv.index("--settings") + 1]))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    registrars = [Registrar(settings, router, stop) for router in settings.routers]
    handler = functools.partial(_Health, registrars)
    server = ThreadingHTTPServer(("127.0.0.1", settings.port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with ThreadPoolExecutor(len(registrars)) as pool:
        list(pool.map(Registrar.run, registrars))
    server.shutdown()


if __name__ == "__main__":
    main()
