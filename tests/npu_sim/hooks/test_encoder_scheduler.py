"""The encode instance's scheduler over those of vllm-ascend, of the same pairs as the hooks."""

from __future__ import annotations

import pytest

from tests.npu_sim.hooks.test_hooks import NEWEST, OLDEST, Pair, run

TESTS = "tests/integration/vllm_plugin/test_encoder_scheduler.py"


@pytest.mark.parametrize(
    "pair",
    [pytest.param(OLDEST, marks=pytest.mark.full), NEWEST],
    ids=lambda pair: f"vllm-ascend {pair.ascend}",
)
def test_requests_are_encoded_whole_and_in_order_over_the_schedulers_of_this_pair(
    pair: Pair,
) -> None:
    # Where vLLM has been imported already, so have others.
    known = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    words = ["-q", "-p", "no:cacheprovider", "-W", known, TESTS]
    result = run(pair, f"import sys, pytest\nsys.exit(pytest.main({words!r}))")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout
