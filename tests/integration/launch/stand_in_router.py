"""A small server that stands in for the router: it sends requests on to engines that are stand-ins.

``/work/1.5`` goes to an engine of a role that may have work, the one with the least; while it has
none the answer is 503. It knows which engines answer ``/health``, takes one out and in again for
signed requests to ``/epd/instances``, and at SIGTERM answers what is open before it ends. It does
not reproduce pictures, retries, warm-ups or anything else that the router does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from epd_portable.config.secret import Secret, SignatureCheck
from epd_portable.errors import RequestError

PROBE_EVERY_S = 0.05


@dataclass
class Engine:
    name: str
    role: str
    url: str
    healthy: bool = False
    draining: bool = False
    in_flight: int = 0

    def shown(self) -> dict[str, object]:
        state = "draining" if self.draining else "up" if self.healthy else "down"
        return {
            "name": self.name,
            "role": self.role,
            "state": state,
            "in_flight": self.in_flight,
            "idle": not self.in_flight,
            "reason": "",
            "problem": "",
        }


engines: dict[str, Engine] = {}
lock = threading.Lock()
open_requests = 0
draining = False
check: SignatureCheck
options: argparse.Namespace


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        match self.path.split("/")[1:]:
            case ["health"]:
                shown = {engine.name: engine.shown() for engine in engines.values()}
                self.say(
                    503 if draining else 200,
                    {"instances": shown} if self.signed() else {"status": "ok"},
                )
            case ["work", _]:
                self.work()
            case ["epd", "instances"]:
                if self.vouched_for():
                    shown = [engine.shown() for engine in engines.values()]
                    self.say(200, {"router": "one", "instances": shown})
            case ["in-flight"]:
                self.say(200, {"in_flight": sum(each.in_flight for each in engines.values())})

    def do_POST(self) -> None:
        match self.path.split("/")[1:]:
            case ["epd", "instances", name, "drain" | "resume" as what]:
                if not self.vouched_for():
                    return
                if what == "drain" and options.refuses:
                    self.say(409, {"error": {"message": "not now"}})
                    return
                with lock:
                    engines[name].draining = what == "drain"
                print(f"{what} {name}", flush=True)
                self.say(200, engines[name].shown())

    def vouched_for(self) -> bool:
        try:
            self.check()
        except RequestError as error:
            self.say(error.status, {"error": {"message": str(error)}})
            return False
        return True

    def signed(self) -> bool:
        with contextlib.suppress(RequestError):
            self.check()
            return True
        return False

    def check(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        check.check(self.headers.get("authorization", ""), self.command, self.path, body)

    def work(self) -> None:
        global open_requests
        with lock:
            free = [each for each in engines.values() if each.healthy and not each.draining]
            engine = min(free, key=lambda each: each.in_flight, default=None)
            if engine is not None:
                engine.in_flight += 1
            open_requests += 1
        try:
            if engine is None:
                self.say(503, {"error": {"message": "no engine"}})
                return
            with urllib.request.urlopen(engine.url + self.path, timeout=60) as answer:
                self.say(200, {"engine": engine.name, "pid": int(answer.read())})
        except OSError as error:
            self.say(502, {"error": {"message": f"{engine and engine.name}: {error!r}"}})
        finally:
            with lock:
                open_requests -= 1
                if engine is not None:
                    engine.in_flight -= 1

    def say(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        pass


def keep_probing(engine: Engine) -> None:
    while True:
        try:
            with urllib.request.urlopen(engine.url + "/health", timeout=1.0):
                engine.healthy = True
        except OSError:
            engine.healthy = False
        time.sleep(PROBE_EVERY_S)


def main() -> None:
    global check, options
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--secret", default="0" * 64)
    parser.add_argument("--engine", action="append", default=[], help="NAME=ROLE=URL")
    parser.add_argument("--never-ends", action="store_true", help="at SIGTERM")
    parser.add_argument("--refuses", action="store_true", help="to drain an engine")
    options = parser.parse_args()
    check = SignatureCheck(Secret(options.secret))
    for words in options.engine:
        engine = Engine(*words.split("=", 2))
        engines[engine.name] = engine
        threading.Thread(target=keep_probing, args=(engine,), daemon=True).start()
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Answer)

    def drain() -> None:
        print("drains", flush=True)
        while open_requests or options.never_ends:
            time.sleep(0.01)
        print("has answered everybody", flush=True)
        server.shutdown()

    def asked_to_end(signum: int, frame: object) -> None:
        global draining
        print(f"got {signal.Signals(signum).name}", flush=True)
        if not draining:
            draining = True
            threading.Thread(target=drain).start()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, asked_to_end)
    with contextlib.closing(server.socket):
        server.serve_forever()


if __name__ == "__main__":
    main()
