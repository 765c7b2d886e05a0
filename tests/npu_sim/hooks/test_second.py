"""vllm-ascend's second model runner, as installed, has every hook that our code uses."""

from __future__ import annotations

import json
from pathlib import Path

from tests.npu_sim.hooks.second import SECOND
from tests.npu_sim.hooks.test_hooks import NEWEST, run

OVER_VLLM = "tests/integration/vllm_plugin/test_second_runner.py"


def test_its_hooks_are_there_as_our_code_uses_them(tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    code = (
        "from tests.npu_sim.hooks.probe import main\n"
        "from tests.npu_sim.hooks.second import SECOND\n"
        f"main({str(file)!r}, SECOND)"
    )
    result = run(NEWEST, code)
    assert result.returncode == 0, result.stderr
    problems = json.loads(file.read_text("utf-8"))["problems"]
    assert problems == dict.fromkeys(hook.title for hook in SECOND)


def test_what_holds_over_the_second_runner_of_vllm_holds_with_vllm_ascend() -> None:
    known = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    words = ["-q", "-p", "no:cacheprovider", "-W", known, OVER_VLLM]
    result = run(NEWEST, f"import sys, pytest\nsys.exit(pytest.main({words!r}))")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout
