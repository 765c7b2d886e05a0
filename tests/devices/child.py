"""A process with a device, that runs one line of Python at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType

from tests import warm
from tests.npu_sim.forks import remove_counters

MARK = "@@"
LOOP = """
import msgspec, sys, torch
from epd_portable.connector.control import new_session
from epd_portable.connector.copies import DeviceCopies
from epd_portable.connector.slab import DeviceSlab
from epd_portable.platforms import registry
from epd_portable.platforms.base import ShareHandle
platform = registry.get(sys.argv[1])
last = platform.device_count() - 1
platform.set_device(last)
device = platform.device(last)
def done():
    platform.record_event().synchronize(60)
for line in sys.stdin:
    code = bytes.fromhex(line).decode()
    try:
        try:
            answer = str(eval(code))
        except SyntaxError:
            exec(code)
            answer = "done"
    except Exception as error:
        answer = f"{type(error).__name__}: {error}".replace(chr(10), " ")
    print("@@" + answer, flush=True)
"""
DEADLINE_S = 180.0


class Child:
    """The process: it has ``platform``, its ``device`` and ``done()``, which waits for that.

    Args:
        platform: Name of its platform.
        env: Variables beyond those of this process.
    """

    def __init__(self, platform: str, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOOP, platform],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            cwd=warm.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, code: str) -> str:
        """Return the value of an expression, ``done`` after a statement, or the error."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(code.encode().hex() + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(MARK):
                return line.removeprefix(MARK).rstrip("\n")
        raise AssertionError(f"the child ended with {self.process.wait(DEADLINE_S)} on {code!r}")

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        remove_counters(self.process.pid)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(DEADLINE_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.kill()
        self.process.stdout.close()
