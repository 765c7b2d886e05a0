"""Python processes with settings of their own: torch_npu reads most of them once."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType

from tests import warm
from tests.npu_sim.forks import Nursery, remove_counters

DEADLINE_S = 180.0
IMPORTS = """
import torch
from epd_portable.config import instance
from epd_portable.connector import copies, endpoint, pool, producer, registry, worker_endpoint
from epd_portable.platforms import collectives_torch, npu
from epd_portable.runners import placer, receiver, sender
"""


def environment(settings: Mapping[str, str | None]) -> dict[str, str]:
    """Return this process's environment with some variables set, or with ``None`` removed."""
    changed = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
    return {name: value for name, value in changed.items() if value is not None}


@functools.cache
def nursery(**settings: str) -> Nursery:
    """Return what processes are forked off: with torch_npu, our platform and our connector.

    Args:
        settings: What must be set before anything is imported.
    """
    return Nursery(IMPORTS, **settings)


@functools.cache
def nursery_with_engine() -> Nursery:
    """Return what processes are forked off that need vLLM and vllm-ascend as well."""
    return Nursery("import torch, vllm_ascend.vllm_ascend_C, vllm_ascend.worker.model_runner_v1")


def checked(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run(code: str, **settings: str | None) -> str:
    """Run a script to its end, and return what it printed."""
    preload = {name: value for name, value in settings.items() if value and name == "LD_PRELOAD"}
    return checked(nursery(**preload).finish(code, environment(settings), DEADLINE_S))


def run_afresh(code: str, **settings: str | None) -> str:
    """Do the same in a process that imports everything itself, and ends as a process does."""
    return checked(
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment(settings),
            cwd=warm.ROOT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DEADLINE_S,
            check=False,
        )
    )


class Child:
    """A process that runs one line of Python at a time, and answers each with one line."""

    MARK = "@@"
    LOOP = """
import msgspec, sys, torch
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
        self.process = nursery().popen(
            *("-c", self.LOOP),
            env=environment(settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
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
        remove_counters(self.process.pid)
        self.process.stdout.close()
