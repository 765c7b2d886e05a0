"""`epd-bench step` as it is: a receiver with a real pool and control channel."""

from __future__ import annotations

import json
import os
from pathlib import Path

from click.testing import CliRunner

from epd_benchmarks.cli import main


def test_each_combination_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    page = tmp_path / "steps.json"
    result = CliRunner().invoke(main, ["step", "--steps", "10", "--json", str(page)])
    assert result.exit_code == 0, result.output
    data = json.loads(page.read_text())
    rows = [(row["decoding"], row["items"], row["waiting"]) for row in data["samples"]]
    assert rows == [(256, items, waiting) for items in (1, 32) for waiting in (0, 100, 1000)]
    for case in data["samples"]:
        assert len(case["step_s"]) == len(case["asking_s"]) == 10
        assert all(0 < each < 1 for each in (*case["step_s"], *case["asking_s"]))
    assert not list(Path("/dev/shm").glob(f"epd-bench-{os.getpid()}-*"))
