"""``epd-bench transfer`` as a whole: its command and the two ends that it starts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests import warm
from tests.contract.pairs import PATHS
from tests.waiting import until


@pytest.mark.parametrize(
    "asked", [("shm",), pytest.param((), marks=pytest.mark.full)], ids=["one path", "every path"]
)
def test_a_transfer_is_measured_and_reported(tmp_path: Path, asked: tuple[str, ...]) -> None:
    """By the paths that are asked for, or by all that the platform has."""
    report = tmp_path / "transfer.json"
    argv = ["-m", "epd_benchmarks.cli", "transfer"]
    argv += ["--bytes", "64KiB", "--repeat", "3"]
    argv += ["--json", str(report), *(word for path in asked for word in ("--path", path))]
    result = warm.nursery().run(*argv, timeout=180)
    assert result.returncode == 0, result.stderr
    written = json.loads(report.read_text())
    assert written["command"].startswith("epd-bench transfer")
    measured = [(row["path"], row["encode_s"]) for row in written["samples"]]
    assert measured == [
        (path, encode_s)
        for path in asked or (path for path in PATHS if path != "ipc")
        for encode_s in (0.01, 0.0)
    ]
    for row in written["samples"]:
        for placing_s, total_s in zip(row["placing_s"], row["total_s"], strict=True):
            assert 0 < placing_s < total_s < 60
    assert all(f"| {path}, 64 KiB, granted" in result.stdout for path, _ in measured)
    assert ("ipc (cpu has no device memory)" in result.stdout) is (not asked)


def test_a_signal_to_its_group_ends_it_and_leaves_nothing() -> None:
    code = "import os; os.setsid(); from epd_benchmarks.cli import main; main()"
    command = warm.nursery().popen("-c", code, "transfer", "--path", "shm")
    pools = Path("/dev/shm")
    until(lambda: any(pools.glob(f"epd-bench-{command.pid}-*")))
    os.killpg(command.pid, signal.SIGTERM)
    assert command.wait(60) == 128 + signal.SIGTERM
    assert not [*pools.glob(f"epd-bench-{command.pid}-*")]
