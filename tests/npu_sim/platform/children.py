"""Python processes with settings of their own: torch_npu reads most of them once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 180.0


def environment(settings: Mapping[str, str | None]) -> dict[str, str]:
    """Return this process's environment with some variables set, or with ``None`` removed."""
    changed = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
    return {name: value for name, value in changed.items() if value is not None}


def run(code: str, **settings: str | None) -> str:
    """Run a script to its end, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(settings),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Child:
    """A process that runs one line of Python at a time, and answers each with one line."""

    MARK = "@@"
    LOOP = """
import sys, torch
from epd_portable.platforms import registry
from epd_portable.platforms.base import ShareHandle
npu = registry.get("npu")
for line in sys.stdin:
    code = bytes.fromhex(line).decode()
    try:
        try:
            answer = repr(eval(code))
        except SyntaxError:
            exec(code)
            answer = "done"
    except Exception as error:
        answer = f"{type(error).__name__}: {error}".replace(chr(10), " ")
    print("@@" + answer, flush=True)
"""

    def __init__(self, **settings: str | None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.LOOP],
            env=environment(settings),
            cwd=REPOSITORY,
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
            if line.startswith(self.MARK):
                return line.removeprefix(self.MARK).rstrip("\n")
        raise AssertionError(f"the child ended with {self.process.wait(DEADLINE_S)} on {code!r}")

    def kill(self) -> None:
        """End it as a crash would; removes torch's counters of openers, which it then leaves."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        for left in Path("/dev/shm").glob(f"torch_{self.process.pid}_*"):
            left.unlink()

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
            self.process.kill()
            self.process.wait(DEADLINE_S)
        self.process.stdout.close()
