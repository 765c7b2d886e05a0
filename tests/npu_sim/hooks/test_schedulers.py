"""Our schedulers over those of vllm-ascend, of the same pairs as the hooks."""

from __future__ import annotations

import pytest

from tests.npu_sim.hooks.test_hooks import NEWEST, OLDEST, Pair, run

REGISTERED = """
from vllm import ModelRegistry
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Model
ModelRegistry.register_model(Model.__name__, Model)
"""
"""Else vLLM starts a process that imports all of vLLM to look at the class of the demo's model."""
TESTS = [f"tests/integration/vllm_plugin/test_{role}_scheduler.py" for role in ("encoder", "pd")]


@pytest.mark.parametrize(
    "pair",
    [pytest.param(OLDEST, marks=pytest.mark.full), NEWEST],
    ids=lambda pair: f"vllm-ascend {pair.ascend}",
)
def test_what_holds_over_the_schedulers_of_vllm_holds_over_those_of_this_pair(pair: Pair) -> None:
    # Where vLLM has been imported already, so have others.
    known = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    words = ["-q", "-p", "no:cacheprovider", "-W", known, *TESTS]
    result = run(pair, f"{REGISTERED}import sys, pytest\nsys.exit(pytest.main({words!r}))")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout
