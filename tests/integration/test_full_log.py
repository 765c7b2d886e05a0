"""Processes of the launcher whose logs are on a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
WRITES = """
import sys
from epd_portable import log
log.survive_full_disks()
log.survive_full_disks()
print("to stdout", flush=True)
sys.stderr.write("progress")
sys.stderr.flush()
print("to stderr", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("instance", "unbuffered", "status"), [("encode-0", "1", 0), ("encode-0", "", 0), ("", "1", 1)]
)
def test_full_disk_ends_no_process_of_the_launcher(
    instance: str, unbuffered: str, status: int
) -> None:
    environment = {**os.environ, "EPD_INSTANCE": instance, "PYTHONUNBUFFERED": unbuffered}
    with FULL.open("wb", buffering=0) as full:
        command = [sys.executable, "-c", WRITES]
        done = subprocess.run(command, stdout=full, stderr=full, env=environment, timeout=60)
    assert done.returncode == status


def test_lines_come_at_once_and_in_order(tmp_path: Path) -> None:
    environment = {**os.environ, "EPD_INSTANCE": "encode-0"}
    with (tmp_path / "log").open("ab") as log:
        command = [sys.executable, "-c", WRITES + "import os; os._exit(3)"]
        done = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=60)
    assert done.returncode == 3
    assert (tmp_path / "log").read_text() == "to stdout\nprogressto stderr\n"
