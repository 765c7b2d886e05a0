"""A process with a device, that runs one line of Python at a time."""

from __future__ import annotations

import os
import subprocess

from tests import warm
from tests.line_child import ANSWER_LINES, LineChild

BEGIN = """
import msgspec, sys, torch
from epd_portable.transfer.sessions import new_session
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.slab import DeviceSlab
from epd_portable.platforms import registry
from epd_portable.platforms.base import ShareHandle
platform = registry.get(sys.argv[1])
last = platform.device_count() - 1
platform.set_device(last)
device = platform.device(last)
def done():
    platform.record_event().synchronize(60)
"""


class Child(LineChild):
    """The process: it has ``platform``, its ``device`` and ``done()``, which waits for that.

    Args:
        platform: Name of its platform.
        env: Variables beyond those of this process.
    """

    def __init__(self, platform: str, **env: str) -> None:
        super().__init__(
            warm.start(
                *("-c", BEGIN + ANSWER_LINES, platform),
                cold=platform == "cuda",
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
