"""Triton kernels as they are written compute in the memory of a simulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
INTERPRETER = Path(sys.prefix) / "interpreter"


def test_kernels_read_and_write_device_memory_by_its_addresses() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ci.ascend_sim.tests.operators.kernels"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{INTERPRETER}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer["has_triton"]
    assert answer["sums"] == [0.0, 111.0, 222.0, 0.0], "a table of pointers, three columns of four"
    assert answer["found"] == [[1, 1, 3], [0, 1, 3]], "a scalar compares to a truth value"
    assert answer["cores"] > 0
