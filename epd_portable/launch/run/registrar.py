"""``python -m epd_portable.launch.run.registrar``: registers instances at routers elsewhere.

The launcher starts it in place of a router when ``router.join`` names some. It registers each
instance at each address of each of them once that is healthy, keeps it registered, and lets all
leave at SIGTERM, before the launcher ends them. Its ``GET /health`` has the form of a router's,
with what routers last said of each instance, and answers 200 when all are up at all of them.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from epd_portable.config.secret import Secret
from epd_portable.errors import LaunchError
from epd_portable.launch.plan.addresses import addresses_of
from epd_portable.launch.plan.processes import RegistrarSettings
from epd_portable.launch.run.router_client import RouterClient

_PROBE_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 1.0


class Registrar:
    """Keeps one instance registered at one router.

    Args:
        instance: Fields of `InstanceSettings`.
        is_named: Returns whether ``router.join`` still leads to that router.
        stop: Lets the instance leave.

    Attributes:
        seen: What the router last said of the instance: ``state``, ``reason``, ``problem``. Before
            it knows the instance the state is ``starting``, and ``gone`` once it was removed.
    """

    def __init__(
        self,
        instance: Mapping[str, Any],
        router: RouterClient,
        settings: RegistrarSettings,
        is_named: Callable[[], bool],
        stop: threading.Event,
    ) -> None:
        self.name: str = instance["name"]
        self.seen = {"state": "starting", "reason": "", "problem": ""}
        self._instance = instance
        self._router = router
        self._settings = settings
        self._is_named = is_named
        self._stop = stop
        self._registered = ""  # the router process that has the instance

    def run(self) -> None:
        """Register when it is healthy, and again with every restart of the router; then leave.

        Returns without it when the router is neither named any more nor there.
        """
        said = ""
        while not self._stop.is_set():
            try:
                self._look()
                said = ""
            except LaunchError as error:
                if not self._is_named():
                    self._print(f": router {self._router} has gone")
                    return
                if str(error) != said:
                    said = str(error)
                    self._print(f": {said}")
            self._stop.wait(_LOOK_EVERY_S)
        if self._registered:
            try:
                self._router.leave(self.name, timeout_s=self._settings.leave_timeout_s)
                self._print(f" has left {self._router}")
            except LaunchError as error:
                self._print(f": {error}")

    def _look(self) -> None:
        router, seen = self._router.find_instance(self.name)
        if self._registered and seen is not None:
            self._note(seen)
        elif self._registered == router:
            self._removed()
            self._registered = ""
        elif self._is_healthy():  # A router forgets unhealthy ones.
            again = " again: the router has restarted" if self._registered else ""
            self._registered = self._router.register(self._instance)
            timeout_s = self._settings.join_timeout_s
            self._note(self._router.wait_up(self.name, timeout_s=timeout_s, until=self._stop))
            self._print(f" has joined {self._router}{again}")

    def _removed(self) -> None:
        """Return at once if the router has removed an instance that was away for too long.

        A healthy one was removed on purpose, and is not registered again.
        """
        reason = f"router {self._router} has removed {self.name}"
        self.seen = {"state": "gone", "reason": reason, "problem": ""}
        print(reason, flush=True)
        if self._is_healthy():
            self._print(" joins again when it is started again")
            self._stop.wait()

    def _note(self, seen: Mapping[str, Any]) -> None:
        self.seen = {key: seen[key] for key in ("state", "reason", "problem")}

    def _is_healthy(self) -> bool:
        url = f"{self._instance['url']}/health"
        try:
            answer = httpx.get(url, timeout=_PROBE_TIMEOUT_S, trust_env=False)
        except httpx.HTTPError:
            return False
        return answer.status_code == HTTPStatus.OK

    def _print(self, text: str) -> None:
        print(f"{self.name}{text}", flush=True)


class Membership:
    """Every instance at every router that ``router.join`` leads to, also as its names change.

    Args:
        stop: Lets all instances leave.
        resolve: Returns the addresses of a router's URL; raises `LaunchError` if there are none.
    """

    def __init__(
        self,
        settings: RegistrarSettings,
        stop: threading.Event,
        resolve: Callable[[str], list[str]] = addresses_of,
    ) -> None:
        self._settings = settings
        self._stop = stop
        self._resolve = resolve
        self._secret = Secret.read(settings.secret_file)
        self._addresses: dict[str, list[str]] = {}
        self._registrars: dict[tuple[str, str, str], tuple[Registrar, threading.Thread]] = {}

    def run(self) -> None:
        """Follow the names of the routers until the stop, and return when all have left."""
        said: dict[str, str] = {}
        while not self._stop.is_set():
            for url in self._settings.routers:
                try:
                    self._addresses[url] = self._resolve(url)
                    said.pop(url, None)
                except LaunchError as error:  # Routers that were known may still be there.
                    if said.get(url) != str(error):
                        said[url] = str(error)
                        print(f"router {url}: {error}", flush=True)
            self._follow()
            self._stop.wait(_LOOK_EVERY_S)
        for _, thread in self._registrars.values():
            thread.join()

    def states(self) -> dict[str, dict[str, str]]:
        """Return what is seen of each instance; of several routers that of one without it."""
        shown: dict[str, dict[str, str]] = {}
        for each, _ in tuple(self._registrars.values()):
            if shown.get(each.name, {"state": "up"})["state"] == "up":
                shown[each.name] = each.seen
        nowhere = {"state": "starting", "reason": "router.join has no address", "problem": ""}
        return {each["name"]: shown.get(each["name"], nowhere) for each in self._settings.instances}

    def _follow(self) -> None:
        """Start a registrar for whatever is new, and forget those that have returned."""
        for key, (_, thread) in tuple(self._registrars.items()):
            if not thread.is_alive():
                del self._registrars[key]
        for url, addresses in self._addresses.items():
            for address in addresses:
                for instance in self._settings.instances:
                    key = (url, address, instance["name"])
                    if key not in self._registrars:
                        self._start(key, instance)

    def _start(self, key: tuple[str, str, str], instance: Mapping[str, Any]) -> None:
        url, address, _ = key
        registrar = Registrar(
            instance,
            RouterClient(url, self._secret, address=address),
            self._settings,
            lambda: address in self._addresses[url],
            self._stop,
        )
        thread = threading.Thread(target=registrar.run, daemon=True)
        self._registrars[key] = registrar, thread
        thread.start()


class _Health(BaseHTTPRequestHandler):
    def __init__(self, membership: Membership, *args: Any) -> None:
        self._membership = membership
        super().__init__(*args)

    def do_GET(self) -> None:
        shown = self._membership.states()
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


def main() -> None:
    """Run until SIGTERM or SIGINT."""
    settings = RegistrarSettings(**json.loads(sys.argv[sys.argv.index("--settings") + 1]))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    membership = Membership(settings, stop)
    handler = functools.partial(_Health, membership)
    server = ThreadingHTTPServer(("127.0.0.1", settings.port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    membership.run()
    server.shutdown()


if __name__ == "__main__":
    main()
