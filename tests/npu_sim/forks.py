"""Processes that are forked off one which has imported torch_npu and has used no device.

Each has an environment of its own: torch_npu and the runtime read theirs when a device is first
used, but for what decides what is imported. They end as torch_npu wants it, without taking the
interpreter down, which takes a second: that, and imports, fresh processes show.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence

from tests import warm

NO_GC = "import gc; gc.disable()"
"""Python before imports, see `warm.main`."""


class Nursery(warm.Nursery):
    """The process that others are forked off.

    Args:
        imports: Python that is run in it.
        options: Of the interpreter.
        settings: Environment variables.
    """

    def __init__(self, imports: str, *, options: Sequence[str] = (), **settings: str) -> None:
        serves = "from tests.npu_sim.forks import serve"
        self._begin(
            lambda pipe: [*options, "-c", f"{NO_GC}\n{imports}\n{serves}\nserve({pipe})"],
            settings,
            stdout=subprocess.DEVNULL,
        )
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        super().close()

    def finish(self, code: str, env: Mapping[str, str], timeout_s: float) -> warm.Ended:
        """Run a script to its end; killed at the timeout."""
        return self.run("-c", code, env=env, timeout=timeout_s)


def serve(number: int) -> None:
    """Be the nursery, and in a process forked off it run what is asked for, and end it."""
    with socket.socket(fileno=number) as pipe:
        words = warm.serve(pipe)
    if words is None:
        os._exit(0)
    warm.run_to_end(words)
