"""The encode instance's scheduler over those of vllm-ascend, of the same pairs as the hooks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.npu_sim.hooks.test_hooks import NEWEST, OLDEST, ROOT, Pair

DEADLINE_S = 500.0


@pytest.mark.parametrize(
    "pair",
    [pytest.param(OLDEST, marks=pytest.mark.full), NEWEST],
    ids=lambda pair: f"vllm-ascend {pair.ascend}",
)
def test_requests_are_encoded_whole_and_in_order_over_the_schedulers_of_this_pair(
    pair: Pair,
) -> None:
    path = os.pathsep.join(filter(None, [pair.folder, str(ROOT)]))
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            "tests/integration/vllm_plugin/test_encoder_scheduler.py",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout
