"""Python processes with settings of their own: torch_npu reads most of them once."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping

from tests import warm
from tests.line_child import ANSWER_LINES, DEADLINE_S, LineChild
from tests.npu_sim.forks import Nursery

IMPORTS = """
import torch
from epd_portable.config import instance
from epd_portable.encode import producer
from epd_portable.transfer import copies, endpoint, pool, registry, worker_endpoint
from epd_portable.platforms import collectives, npu
from epd_portable.items import placer, shell
from epd_portable.encode import sender
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


class Child(LineChild):
    """A process with torch_npu, which has our platform as ``npu``; see `LineChild`."""

    BEGIN = """
import msgspec, torch
from epd_portable.platforms import registry
from epd_portable.platforms.base import ShareHandle
npu = registry.get("npu")
"""

    def __init__(self, **settings: str | None) -> None:
        super().__init__(
            nursery().popen(
                *("-c", self.BEGIN + ANSWER_LINES),
                env=environment(settings),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
