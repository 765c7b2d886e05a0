"""Prints what kind of process it is, and ends with status 7; or kills itself."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from epd_portable import envs

if sys.argv[1:] == ["kill"]:
    os.kill(os.getpid(), signal.SIGKILL)
links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
shown = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
variables = Path("/proc/self/environ").read_bytes().rstrip(b"\0").decode().split("\0")
print(
    {
        "argv": sys.argv[1:],
        "shown": shown[1:],
        "level": envs.EPD_LOG_LEVEL.get(),
        "shown level": [each for each in variables if each.startswith("EPD_LOG_LEVEL=")],
        "room": "ROOM" in os.environ or any(each.startswith("ROOM=") for each in variables),
        "had": "statistics" in sys.modules,
        "stdin": sys.stdin.read(),
        "leads": os.getsid(0) == os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "pid": os.getpid(),
        "main": sys.modules["__main__"].__spec__.name,
        "sockets": sum("socket" in os.readlink(link) for link in links if link.is_symlink()),
    }
)
sys.exit(7)
