"""``epd-bench transfer`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_transfer_is_measured_on_every_path_and_reported(tmp_path: Path) -> None:
    report = tmp_path / "transfer.json"
    argv = [sys.executable, "-m", "epd_portable.bench.cli", "transfer"]
    argv += ["--path", "shm", "--path", "tcp", "--bytes", "64KiB", "--repeat", "3"]
    result = subprocess.run(
        [*argv, "--json", str(report)], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "shm, 64 KiB" in result.stdout
    assert "tcp, 64 KiB" in result.stdout
    assert json.loads(report.read_text())["command"].startswith("epd-bench transfer")
