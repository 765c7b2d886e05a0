"""Looks at the engine processes of a running topology from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import httpx
import psutil

DEADLINE_S = 90.0


def instance(launcher: int, ec_role: str) -> psutil.Process:
    """Return the API server of the instance with this role."""
    for child in psutil.Process(launcher).children():
        if any(f'"ec_role": "{ec_role}"' in word for word in child.cmdline()):
            return child
    raise AssertionError(f"no instance with {ec_role}")


def metric(launcher: int, ec_role: str, name: str) -> float:
    """Return a metric of an instance, summed over its labels, as vLLM itself reports it."""
    command = instance(launcher, ec_role).cmdline()
    port = command[command.index("--port") + 1]
    exposition = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30, trust_env=False).text
    lines = [line for line in exposition.splitlines() if line.startswith(f"{name}{{")]
    assert lines, f"no metric {name}"
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll a condition until it holds.

    Raises:
        AssertionError: It did not in time.
    """
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.1)


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the files of ``/dev/shm`` that processes map."""
    mapped = (Path(each.path) for process in processes for each in process.memory_maps())
    return {path for path in mapped if path.parent == Path("/dev/shm") and path.exists()}
