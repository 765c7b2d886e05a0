"""``epd-bench transfer`` between two simulated devices: that it works, never how fast it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full

TIMEOUT_S = 300
COPY_S = 0.02
"""Seconds of a copy between devices or from the host; copies within a device are not delayed."""
ROUNDS = 2
MIB = 1 << 20


def transfer(folder: Path, *options: str, **settings: int) -> tuple[str, dict[str, Any]]:
    """Run it on ``npu``; return the page and the JSON."""
    report = folder / "transfer.json"
    argv = [sys.executable, "-m", "epd_benchmarks.cli", "transfer", "--platform", "npu"]
    env = {**os.environ, **{f"ASCEND_SIM_{name}": str(value) for name, value in settings.items()}}
    result = subprocess.run(
        [*argv, *options, "--json", str(report)],
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads(report.read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """All paths, with slow copies."""
    folder = tmp_path_factory.mktemp("transfer")
    options = ("--bytes", "64KiB", "--repeat", str(ROUNDS))
    return transfer(folder, *options, DEVICES=2, COPY_US=round(COPY_S * 1e6))


def test_items_are_moved_from_device_to_device_by_every_path(
    measured: tuple[str, dict[str, Any]],
) -> None:
    page, data = measured
    rows = {case["path"]: len(case["total_s"]) for case in data["samples"]}
    assert rows == dict.fromkeys(("ipc", "shm", "collective", "tcp"), ROUNDS)
    assert "Platform npu (torch_npu " in page
    assert "producer on device 0, consumer on device 1" in page


def test_baseline_is_a_complete_copy_between_devices(measured: tuple[str, dict[str, Any]]) -> None:
    _, data = measured
    for case in data["samples"]:
        assert min(case["memcpy_s"]) >= COPY_S, case


def test_items_larger_than_the_device_pass_through_its_memory(tmp_path: Path) -> None:
    memory, size, rounds = 256 * MIB, 16 * MIB, 20
    assert rounds * size > memory
    options = ("--path", "ipc", "--bytes", str(size), "--repeat", str(rounds))
    page, data = transfer(tmp_path, *options, DEVICES=1, MEM_MB=memory // MIB)
    assert [len(case["total_s"]) for case in data["samples"]] == [rounds, rounds]
    assert "both ends on device 0, the only one" in page
