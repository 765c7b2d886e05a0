"""A launcher as the child of another program, as an actor of a cluster: it ends with its holder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from epd_portable.config.folders import temp_folder
from epd_portable.errors import LaunchError
from epd_portable.launch.environment import child_environ
from epd_portable.launch.plan.launchers import FOLDER, LauncherSpec
from epd_portable.launch.plan.processes import new_run_id, shm_prefix
from epd_portable.launch.run.guard import Guard
from epd_portable.launch.run.running import RunRecord, find_runs
from epd_portable.launch.run.wait import Wait

_GRACE_S = 1.0
"""Of a launcher whose holder is gone; its own guard ends what it leaves."""
_CLEAN_UP_S = 60.0
_LOOK_EVERY_S = 1.0
_NOT_ITS_OWN = ("OMP_NUM_THREADS",)
"""Variables by which a cluster limits the holder's process, not the engines."""


class HeldLauncher:
    """``epd-launch`` as a child process, whose notices are printed.

    Args:
        settings: What is laid over that, as ``--set`` takes it.

    Attributes:
        run_id: Of its run, once it is known.
        said: Text of its last notice.
        stops_s: Longest time that `stop` takes.
        url: Base address for clients, once it is ready.
    """

    def __init__(self, spec: LauncherSpec, *settings: str) -> None:
        self._stop_s = spec.stop_s
        self.stops_s = spec.stop_s + 2 * _CLEAN_UP_S
        self.run_id = self.url = self.said = ""
        self._failure = ""
        self._start_s = spec.start_s
        self._asked = False
        self._ready = threading.Event()
        self._ended = threading.Event()
        folder = Path(tempfile.mkdtemp(prefix="epd-held-"))
        for name, text in spec.files.items():
            os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL, mode=0o600))
            (folder / name).write_text(text, "utf-8")
        mark = new_run_id()
        self._guard = Guard(
            run_id=mark,
            shm_prefix=shm_prefix(mark),
            temp_dir=folder,
            grace_s=_GRACE_S,
            log=folder / "guard.log",
        )
        argv = [each.replace(FOLDER, str(folder)) for each in spec.command]
        for each in settings:
            argv += ["--set", each]
        environ = {name: value for name, value in os.environ.items() if name not in _NOT_ITS_OWN}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "epd_portable.launch.cli", *argv, "--json"],
            env=child_environ(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._guard.watch(self._process.pid)
        threading.Thread(target=self._read, daemon=True).start()

    def wait_ready(self) -> None:
        """Wait until it is ready.

        Raises:
            LaunchError: It has ended before, or does neither in time; says why.
        """
        wait = Wait("the launcher is not ready", self._start_s)
        while not self._ready.wait(_LOOK_EVERY_S):
            wait.go_on(self.said)
        self.require()

    def wait_ended(self) -> bool:
        """Wait until it has ended; return whether it was asked to."""
        self._ended.wait()
        return self._asked

    def require(self) -> None:
        """Raise `LaunchError` if it has ended; says why."""
        if self._ended.is_set():
            raise LaunchError(self._failure)

    def record(self) -> RunRecord | None:
        """Return how its run is; ``None`` before it has written that down."""
        found = find_runs(temp_folder())
        return next((run for run in found if run.run_id == self.run_id), None)

    def stop(self) -> None:
        """Let it end as by Ctrl-C; if that takes too long it is killed. Nothing of it is left."""
        self._asked = True
        self._process.terminate()
        self._ended.wait(self._stop_s)
        self._guard.close(timeout_s=_CLEAN_UP_S)
        try:
            self._process.wait(_CLEAN_UP_S)
        except subprocess.TimeoutExpired as error:
            raise LaunchError(
                f"launcher {self._process.pid} does not end, not even killed"
            ) from error

    def _read(self) -> None:
        """Print its notices, and note what they say, until it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            notice: dict[str, Any] = json.loads(line)
            match notice["event"]:
                case "error":
                    self._failure = notice["error"]["message"]
                    print(f"error: {self._failure}", flush=True)
                    continue
                case "starting":
                    self.run_id = notice["run_id"]
                case "ready":
                    self.url = notice["url"].removesuffix("/v1")
                    self._ready.set()
            self.said = notice["text"]
            print(self.said, flush=True)
        status = self._process.wait()
        self._failure = self._failure or f"the launcher has ended with status {status}"
        self._ended.set()
        self._ready.set()
