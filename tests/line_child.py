"""A process that runs one line of Python at a time, and answers each with one line."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tests import warm

if TYPE_CHECKING:
    from typing import Self

DEADLINE_S = 180.0
MARK = "@@"
ANSWER_LINES = f"""
import sys
for line in sys.stdin:
    code = bytes.fromhex(line).decode()
    try:
        try:
            answer = str(eval(code))
        except SyntaxError:
            exec(code)
            answer = "done"
    except Exception as error:
        answer = f"{{type(error).__name__}}: {{error}}"
    print("{MARK}" + answer.replace(chr(10), " "), flush=True)
"""
"""The end of what such a process runs; before it stands what lines may use."""


class LineChild:
    """The test's end of it.

    Args:
        process: Runs `ANSWER_LINES`, with pipes of text as its input and output.
    """

    def __init__(self, process: warm.Process) -> None:
        self.process = process

    def tell(self, code: str) -> str:
        """Return the value of an expression as text, ``done`` after a statement, or the error."""
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

    def __enter__(self) -> Self:
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
        remove_counters(self.process.pid)
        self.process.stdout.close()


def remove_counters(pid: int) -> None:
    """Remove the files in which torch counts the openers of memory that a process shared.

    Only a process that takes itself down removes its own.
    """
    for left in Path("/dev/shm").glob(f"torch_{pid}_*"):
        left.unlink()
