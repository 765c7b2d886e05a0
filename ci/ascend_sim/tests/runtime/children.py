"""Child processes of the runtime's tests."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import sysconfig
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.npu_sim.forks import Nursery

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
DEADLINE_S = 120

# Without `site` no .pth file is read, so the double of the operators stays away.
_PATHS = [str(HERE.parent), sysconfig.get_paths()["purelib"]]
_PROLOGUE = f"""
import ctypes, os, sys
sys.path += {_PATHS!r}
from {HERE.name} import acl, hccl
"""


def _command(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", _PROLOGUE + code]


def environment(settings: dict[str, str]) -> dict[str, str]:
    """Return this process's environment without settings of the runtime, then with these."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ASCEND_SIM_") and name != "ASCEND_RT_VISIBLE_DEVICES"
    }
    return inherited | settings


@functools.cache
def nursery() -> Nursery:
    """Return what processes are forked off that have torch_npu without the double."""
    return Nursery("import torch, torch_npu", ASCEND_SIM_DOUBLE="0")


def run_with_torch(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has imported the real torch_npu, without the double.

    Args:
        code: Python.
        settings: Environment variables.
    """
    return nursery().finish(code, environment(settings), DEADLINE_S)


def run(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has the runtime; of torch_npu it has imported nothing.

    Args:
        code: Python, after ``import ctypes, os, sys`` and the modules ``acl`` and ``hccl``.
        settings: Environment variables.
    """
    return subprocess.run(
        _command(code),
        env=environment(settings),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def answer(code: str, **settings: str) -> str:
    """Run code that must succeed, and return what it printed."""
    return printed(run(code, **settings))


def printed(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a process printed that must have succeeded."""
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}\n{done.stderr}"
    return done.stdout.strip()


@contextmanager
def talking(code: str, **settings: str) -> Iterator[subprocess.Popen[str]]:
    """Start code that reads and prints lines; killed when the block ends, or at the deadline."""
    child = subprocess.Popen(
        _command(code),
        env=environment(settings),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    deadline = threading.Timer(DEADLINE_S, child.kill)
    deadline.start()
    try:
        yield child
    finally:
        deadline.cancel()
        child.kill()
        child.communicate(timeout=DEADLINE_S)


def tell(child: subprocess.Popen[str], line: str = "") -> None:
    """Let the child read a line."""
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()
