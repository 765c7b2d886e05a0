"""A small HTTP server that stands in for an engine: real process, real port, no model.

It answers ``/health``, maps a ``/dev/shm`` file and a child process as an engine does, and computes
nothing. ``/become/503`` sets the status of ``/health``. A completion lasts until ``/release``.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        global status
        match self.path.split("/")[1:]:
            case ["health"]:
                self.say(status, "")
            case ["epd", "instances"]:
                seen = {"state": "up", "reason": "", "problem": options.problem}
                all_seen = [{"name": name, **seen} for name in options.instances.split(",")]
                self.say(status, json.dumps({"front": "x", "instances": all_seen}))
            case ["become", number]:
                status = int(number)
                self.say(200, "")
            case ["release"]:
                released.set()
                self.say(200, "")
            case _:
                self.say(404, "")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        released.wait()
        text = json.dumps({"choices": [{"index": 0, "text": "x"}], "pid": os.getpid()})
        self.say(200, text, "application/json")

    def say(self, status: int, text: str, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        pass


options: argparse.Namespace
status = 200
released = threading.Event()
mapped: list[mmap.mmap] = []


def main() -> None:
    global options
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--shm", default="")
    parser.add_argument("--fail", default="", help="raise this at start")
    parser.add_argument("--hang", action="store_true", help="never answer")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--child", action="store_true", help="start a process that ignores SIGTERM")
    parser.add_argument("--instances", default="encode-0", help="of a front")
    parser.add_argument("--problem", default="", help="what a front says of them")
    parser.add_argument("--renamed", action="store_true", help="as by setproctitle: no environment")
    options = parser.parse_args()
    if options.renamed and "EPD_RUN_ID" in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {})
    print("Starting to load model nothing", flush=True)
    if options.shm:
        file = Path("/dev/shm", options.shm)
        file.write_bytes(b"x" * 4096)
        with file.open("rb") as opened:
            mapped.append(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ))
    if options.fail:
        raise ValueError(options.fail)
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    if options.child:
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", code])
    if options.hang:
        time.sleep(600)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Answer)
    server.serve_forever()


if __name__ == "__main__":
    main()
