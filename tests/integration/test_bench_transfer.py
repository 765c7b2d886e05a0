"""``epd-bench transfer`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_transfer_is_measured_on_every_path_of_the_platform_and_reported(tmp_path: Path) -> None:
    report = tmp_path / "transfer.json"
    argv = [sys.executable, "-m", "epd_portable.bench.cli", "transfer"]
    argv += ["--bytes", "64KiB", "--repeat", "3", "--json", str(report)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    written = json.loads(report.read_text())
    assert written["command"].startswith("epd-bench transfer")
    assert [(row["platform"], row["path"]) for row in written["summary"]] == [
        ("cpu", "shm"),
        ("cpu", "collective"),
        ("cpu", "tcp"),
    ]
    for row in written["summary"]:
        assert f"{row['path']}, 64 KiB" in result.stdout
    assert "ipc (cpu has no device memory)" in result.stdout
