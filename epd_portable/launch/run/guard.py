"""A small process that ends a run when its launcher is gone, however it went.

The launcher holds the write end of the guard's standard input and names each session that it
starts: ``+123`` when it starts, ``-123`` when nothing of it is left. When the pipe closes, even
because the launcher got SIGKILL, the guard ends what is still there and removes what the run left
behind. It runs in a session of its own and ignores the signals that a terminal sends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

from epd_portable.errors import LaunchError
from epd_portable.launch.environment import child_environ, shm_prefix
from epd_portable.launch.run.logs import open_log
from epd_portable.launch.run.sessions import end_processes, members, remove_shm


class Guard:
    """The launcher's end of the guard process.

    At the end the files of the run in ``/dev/shm`` and its folder ``temp_dir`` are removed; ``log``
    is a file for the output of the guard.
    """

    def __init__(self, *, run_id: str, temp_dir: Path, grace_s: float, log: Path) -> None:
        self._settings = [run_id, str(temp_dir), str(grace_s)]
        self._log = log
        self._sessions: set[int] = set()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        words = [*self._settings, *map(str, self._sessions)]
        with open_log(self._log) as output:
            return subprocess.Popen(
                [sys.executable, "-m", "epd_portable.launch.run.guard", *words],
                env=child_environ(os.environ),
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def replace_if_gone(self) -> None:
        """Start another guard, of the same sessions, where this one has ended.

        Raises:
            LaunchError, OSError: It cannot be started.
        """
        if self._process.poll() is not None:
            self._process = self._start()

    def watch(self, session: int) -> None:
        """Name a session that has started."""
        self._sessions.add(session)
        self._write(f"+{session}\n")

    def forget(self, session: int) -> None:
        """Name a session of which nothing is left, before its number is given to another."""
        self._sessions.discard(session)
        self._write(f"-{session}\n")

    def close(self, *, timeout_s: float) -> None:
        """Let the guard end what is left, and wait for it.

        Raises:
            LaunchError: It did not end within ``timeout_s``.
        """
        with contextlib.suppress(BrokenPipeError):  # It is gone already.
            self._pipe().close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise LaunchError(
                f"the guard process {self._process.pid} still cleans up after {timeout_s:g} s"
            ) from error

    def _write(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # See `replace_if_gone`.
            self._pipe().write(line.encode())
            self._pipe().flush()

    def _pipe(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin


def main() -> None:
    """Wait for the launcher's end, then clean up after it."""
    run_id, temp_dir, grace_s, *sessions = sys.argv[1:]
    known = set(map(int, sessions))
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    for line in sys.stdin:
        change = known.add if line[0] == "+" else known.discard
        change(int(line[1:]))
    if alive := members(known, run_id):
        print(
            f"the launcher is gone; ending its processes: {' '.join(map(str, alive))}", flush=True
        )
    left = end_processes(known, run_id, grace_s=float(grace_s))
    if left:
        print(f"these processes cannot be ended: {' '.join(map(str, left))}", flush=True)
    remove_shm(shm_prefix(run_id))
    shutil.rmtree(temp_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
