"""Servers for tests, gone at the end: a real redis-server, in memory, and HTTP in a thread."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer
from pathlib import Path
from typing import Any

from epd_portable.config.store import StoreSection

DEADLINE_S = 30.0


@contextmanager
def serving(server: HTTPServer) -> Iterator[str]:
    """Serve HTTP; give the URL."""
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class RedisServer:
    """A server that can be killed, stopped and started again.

    Args:
        folder: For its log.
        port: Free; where it listens on the loopback.
        options: Of its command line, by name.
    """

    def __init__(self, folder: Path, port: int, **options: str) -> None:
        self.port = port
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def section(self, **keys: Any) -> StoreSection:
        """Return the configuration of a store in it."""
        return StoreSection(kind="redis", url=self.url, **keys)

    def client(self, **options: Any) -> Any:
        """Return a client, for tests to look and meddle."""
        import redis

        return redis.Redis(port=self.port, **options)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        argv = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1"]
        argv += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        for name, value in self._options.items():
            argv += [f"--{name.replace('_', '-')}", value]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        end_s = time.monotonic() + DEADLINE_S
        password = self._options.get("requirepass")
        while True:
            assert time.monotonic() < end_s, (self._folder / "redis.log").read_text("utf-8")
            try:
                with self.client(password=password) as client:
                    client.ping()
                return
            except OSError:
                time.sleep(0.02)
            except Exception as error:
                if "onnect" not in repr(error) and "oading" not in repr(error):
                    raise
                time.sleep(0.02)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(DEADLINE_S)
            self._process = None

    def stop(self) -> None:
        """Let it answer nothing more, with all connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End a `stop`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
