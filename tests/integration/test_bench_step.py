"""`epd-bench step` as it is: a receiver with a real pool and control channel."""

from __future__ import annotations

import json
import os
from pathlib import Path

from click.testing import CliRunner

from epd_portable.bench.cli import main


def test_every_combination_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    page = tmp_path / "steps.json"
    combinations = ["--decoding", "3", "--items", "1", "--items", "64", "--waiting", "0"]
    arguments = ["step", *combinations, "--waiting", "5", "--steps", "10", "--json", str(page)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(page.read_text())
    rows = [(row["decoding"], row["items"], row["waiting"]) for row in data["summary"]]
    assert rows == [(3, 1, 0), (3, 1, 5), (3, 64, 0), (3, 64, 5)]
    assert len(data["samples"]) == 4 * 10
    assert all(each["asking_s"] > 0 and 0 < each["step_s"] < 1 for each in data["samples"])
    assert not list(Path("/dev/shm").glob(f"epd-bench-{os.getpid()}-*"))
