"""Asks a fork server for processes, in place of ``subprocess.Popen``."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from tests.forkserver.processes import ARGUMENT_BYTES, ENVIRONMENT_BYTES, PADDING

ROOT = Path(__file__).parents[2]
BASE = {
    # Read by libraries when they are imported. One thread each: no pool is lost by a fork.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
START_S = 300.0


class ForkServer:
    """A process that has imported modules, and others that are forked from it; a context manager.

    Args:
        modules: What it imports.
        log: Gets what it prints.
        env: Variables beyond `BASE` and those of this process.
    """

    def __init__(
        self, modules: Iterable[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="epd-fork-")
        self._path = str(Path(self._folder.name, "socket"))
        argv = [sys.executable, "-m", "tests.forkserver.server", self._path, ",".join(modules)]
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*argv, " " * ARGUMENT_BYTES],
                cwd=ROOT,
                env={**os.environ, **BASE, **(env or {}), PADDING: " " * ENVIRONMENT_BYTES},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._folder.cleanup()

    def wait(self) -> None:
        """Wait until it has imported everything.

        Raises:
            AssertionError: It ended, or took too long.
        """
        self._connect().close()

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: IO[bytes],
        stderr: int,
        start_new_session: bool,
    ) -> Forked:
        """Start a process as `subprocess.Popen` does, with these arguments only."""
        assert (stdin, stderr, start_new_session) == (subprocess.DEVNULL, subprocess.STDOUT, True)
        asker = self._connect()
        request = {"argv": list(argv), "env": {**BASE, **env}}
        socket.send_fds(asker, [json.dumps(request).encode()], [stdout.fileno()])
        return Forked(asker)

    def run(self, module: str, *arguments: str, timeout_s: float = 300.0) -> None:
        """Run ``python -m MODULE ...`` to its end.

        Raises:
            AssertionError: It failed; the message is what it printed.
        """
        with tempfile.TemporaryFile() as output:
            process = self.popen(
                [sys.executable, "-m", module, *arguments],
                env=os.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = process.wait(timeout_s)
            output.seek(0)
            assert code == 0, output.read().decode(errors="replace")

    def _connect(self) -> socket.socket:
        end_s = time.monotonic() + START_S
        while True:
            asker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                asker.connect(self._path)
                return asker
            except (FileNotFoundError, ConnectionRefusedError):
                asker.close()
                gone = self._process.poll()
                if gone is not None or time.monotonic() > end_s:
                    raise AssertionError(
                        f"the fork server serves not (exit status {gone}): {self._log.read_text()}"
                    ) from None
                time.sleep(0.05)


class Forked:
    """A process that is the fork server's child: as much of `subprocess.Popen` as tests need."""

    def __init__(self, asker: socket.socket) -> None:
        self._asker = asker
        self.pid = int(asker.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._asker], [], [], timeout)[0]:
            told = self._asker.recv(64)
            assert told, "the fork server is gone"
            self.returncode = int(told)
            self._asker.close()
        return self.returncode
