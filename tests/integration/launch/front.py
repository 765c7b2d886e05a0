"""A small HTTP server that stands in for the front: real process, real port, real signatures.

It serves what the launcher calls, ``/health`` and ``/epd/instances``, and passes completions on to
`stand_in` engines. `tests/faults` and `tests/e2e` have the real front.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from epd_portable.config.secret import Secret, SignatureCheck
from epd_portable.errors import RequestError

LOOK_S = 10.0
ME = f"front-{os.getpid()}"


class Engine:
    """An engine, of this launcher or of another."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url
        self.in_flight = 0
        self.leaving = False

    def is_well(self) -> bool:
        """Return whether it answers at once."""
        try:
            return self.send("GET", "/health", b"", LOOK_S)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def send(
        self, method: str, path: str, body: bytes, timeout_s: float | None = None
    ) -> tuple[int, bytes]:
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def seen(self) -> dict[str, Any]:
        state = "up" if self.is_well() else "down"
        reason = "" if state == "up" else "does not answer"
        seen = {"name": self.name, "problem": "", "reason": reason, "in_flight": self.in_flight}
        return {**seen, "state": "draining" if self.leaving else state}


engines: dict[str, Engine] = {}
turns = itertools.count()


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.read = b""
        if self.path == "/health":
            self.say(200, {})
        elif self.allowed():
            seen = [each.seen() for each in [*engines.values()]]
            self.say(200, {"front": ME, "instances": seen})

    def do_POST(self) -> None:
        self.read = self.rfile.read(int(self.headers["content-length"] or 0))
        if self.path == "/v1/completions":
            self.complete()
        elif self.allowed():
            self.register(json.loads(self.read))

    def do_DELETE(self) -> None:
        self.read = b""
        if self.allowed():
            engine = engines[self.path.rpartition("/")[2]]
            engine.leaving = True
            seen = engine.seen()
            forget_idle()
            self.say(200, seen)

    def register(self, told: dict[str, str]) -> None:
        name, url = told["name"], told["url"]
        if name in engines and engines[name].url != url:
            text = f"instance {name!r} is at {engines[name].url} and healthy: take another name"
            self.refuse(RequestError(text, status=409, code="name_taken"))
            return
        engines[name] = Engine(name, url)
        self.say(201, {"front": ME, **engines[name].seen()})

    def complete(self) -> None:
        free = [each for each in [*engines.values()] if not each.leaving and each.is_well()]
        if not free:
            self.say(503, {"error": {"message": "no engine is up"}})
            return
        engine = free[next(turns) % len(free)]
        engine.in_flight += 1
        try:
            status, body = engine.send("POST", self.path, self.read)
        except (OSError, http.client.HTTPException):
            status, body = 500, b"{}"
        finally:
            engine.in_flight -= 1
            forget_idle()
        self.say(status, body)

    def allowed(self) -> bool:
        try:
            given = self.headers["authorization"] or ""
            signatures.check(given, self.command, self.path, self.read)
        except RequestError as error:
            self.refuse(error)
            return False
        return True

    def refuse(self, error: RequestError) -> None:
        self.say(error.status, {"error": {"message": str(error)}})

    def say(self, status: int, body: dict[str, Any] | bytes) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def forget_idle() -> None:
    for each in [*engines.values()]:
        if each.leaving and not each.in_flight:
            engines.pop(each.name, None)


class Server(ThreadingHTTPServer):
    daemon_threads = False  # A front that is to end answers what is open.
    request_queue_size = 64


signatures: SignatureCheck


def main() -> None:
    global signatures
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--secret-file", required=True)
    parser.add_argument("--engine", action="append", default=[], help="NAME,URL")
    options = parser.parse_args()
    signatures = SignatureCheck(Secret.read(options.secret_file))
    for told in options.engine:
        engine = Engine(*told.split(","))
        engines[engine.name] = engine
    server = Server(("127.0.0.1", options.port), Answer)
    end = threading.Thread(target=server.shutdown)
    signal.signal(signal.SIGTERM, lambda *_: end.start())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.serve_forever()
    server.server_close()
    sys.exit(0)


if __name__ == "__main__":
    main()
