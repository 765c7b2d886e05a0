"""Processes of hosts that are namespaces of one machine."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

from ci import hosts
from epd_portable.launch.run.running import ProcessRecord, RunRecord, write_record


def test_front_of_each_host_is_found(tmp_path: Path) -> None:
    machine = hosts.Machine(tmp_path)
    with ExitStack() as closing:
        for number, host in enumerate(hosts.FRONTS):
            folder = machine.home(host) / f"epd-{number:08x}"
            folder.mkdir(parents=True)
            descriptor = os.open(folder, os.O_RDONLY)
            closing.callback(os.close, descriptor)
            # A launcher holds the folder of its run so.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            write_record(folder, run_with_front(number, host))
        found = [hosts.pid_of(machine, host, "front") for host in hosts.FRONTS]
    assert found == [1000, 1001]


def run_with_front(number: int, host: str) -> RunRecord:
    """Return the record of a run whose front is up."""
    url = f"http://{host}:8000"
    front = ProcessRecord(
        name="front", role="front", state="up", url=url, ports={}, log="", pid=1000 + number
    )
    return RunRecord(
        run_id=f"{number:08x}",
        phase="serving",
        platform="cpu",
        model="demo",
        url=url,
        config="",
        pid=1,
        started_s=float(number),
        processes=(front,),
    )
