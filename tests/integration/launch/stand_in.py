"""A small HTTP server that stands in for an engine: real process, real port, no model.

It answers ``/health``, owns a ``/dev/shm`` file and a child process as an engine does. It does not
reproduce anything that an engine computes.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        seen = {"state": "up", "problem": problem} if problem else {"state": "up"}
        self.wfile.write(json.dumps({"instances": {"encode-0": seen}}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


problem = ""


def main() -> None:
    global problem
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--shm", default="")
    parser.add_argument("--fail", default="", help="raise this at start")
    parser.add_argument("--hang", action="store_true", help="never answer")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--child", action="store_true", help="start a process that ignores SIGTERM")
    parser.add_argument("--problem", default="", help="what a router says of its instance")
    options = parser.parse_args()
    problem = options.problem
    print("Starting to load model nothing", flush=True)
    if options.shm:
        Path("/dev/shm", options.shm).write_bytes(b"x" * 4096)
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
